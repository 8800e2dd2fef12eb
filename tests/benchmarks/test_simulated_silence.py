"""The simulation of living nodes whose heartbeats come late: a short course of ``benchmarks/simulated_silence.py``."""

from __future__ import annotations

import pytest

from benchmarks import simulated_silence
from benchmarks.simulated_silence import false_losses


def test_no_living_node_is_lost() -> None:
    found = false_losses(nodes=8, hours=6.0, seed=3)
    assert (found.lost, found.suspected) == (0, 0)
    assert found.longest_s > 0.5
    assert found == false_losses(nodes=8, hours=6.0, seed=3)


def test_agents_that_stand_still_for_long_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation sees what it is there to see."""
    monkeypatch.setattr(simulated_silence, "PAUSE_S", 3.0)
    found = false_losses(nodes=4, hours=6.0, seed=3)
    assert 0 < found.lost <= found.suspected
