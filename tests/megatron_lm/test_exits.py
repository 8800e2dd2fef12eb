"""Behind which step a training exits, as Megatron-LM's arguments, a signal and a stop ask for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from unicron.megatron_lm.exits import Exits


def arguments(**given: Any) -> SimpleNamespace:
    """Return arguments of Megatron-LM's."""
    plain = {"exit_interval": None, "exit_duration_in_mins": None, "exit_signal_handler": False}
    return SimpleNamespace(**plain | {"exit_signal": signal.SIGTERM} | given)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Put the handler of the signal back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_asks_for_an_exit_where_the_arguments_say_so() -> None:
    before = signal.getsignal(signal.SIGTERM)
    Exits(arguments(), steps=10)
    assert signal.getsignal(signal.SIGTERM) is before
    args = arguments(exit_signal_handler=True)
    exits = Exits(args, steps=10)
    assert not args.exit_signal_handler, "Megatron-LM's own handler asks all ranks in every step"
    assert not exits.is_asked(3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert exits.is_asked(3)
    exits.decide(3, last_step=3, stops=False)
    assert args.exit_interval == 3


def test_sigterm_is_left_to_a_program_above_that_stops_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("unicron.megatron_lm.exits.leaves_sigterm", lambda: True)
    exits = Exits(arguments(exit_signal_handler=True), steps=10)
    assert signal.getsignal(signal.SIGTERM) is before
    exits.decide(3, last_step=10, stops=True)  # and then stock's checkpoint is written as well
    with exits:
        raise SystemExit
    with pytest.raises(SystemExit):
        exits.exit()


@pytest.mark.parametrize("handles", [False, True])
def test_a_stop_has_megatron_save_where_a_signal_would_have(handles: bool) -> None:
    args = arguments(exit_signal_handler=handles)
    exits = Exits(args, steps=10)
    exits.decide(3, last_step=10, stops=True)
    assert args.exit_interval == (3 if handles else None)
    if handles:
        with exits:
            raise SystemExit
    exits.decide(4, last_step=10, stops=False)  # the stop was refused
    assert args.exit_interval is None
    exits.exit()


@pytest.mark.parametrize("given", [{"exit_interval": 4}, {"phase_transition_iterations": [4, 8]}])
def test_an_interval_exits_behind_each_multiple_of_it_and_a_phase_at_its_end(given: dict[str, Any]) -> None:
    args = arguments(**given)
    exits = Exits(args, steps=10)
    assert [number for number in range(1, 10) if exits.is_asked(number)] == [4, 8]
    exits.decide(4, last_step=4, stops=False)
    with exits:
        raise SystemExit(0)
    with pytest.raises(SystemExit):
        exits.exit()
