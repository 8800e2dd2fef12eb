"""Two nodes that cannot reach one another while both reach the control plane: one of them is left out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.training import training
from tests.e2e.kit import Record, at

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FOUND_S = 15.0
"""Within this time of the cut all but one side train (issue 11)."""


def new_incidents(bed: Bed, before: set[str]) -> list[Record]:
    return [i for i in bed.client.items("/v1/incidents") if i["id"] not in before]


def known_incidents(bed: Bed) -> set[str]:
    return {incident["id"] for incident in bed.client.items("/v1/incidents")}


def test_a_broken_pair_leaves_out_one_side(bed: Bed, corpus: Path, tmp_path: Path) -> None:
    known = known_incidents(bed)
    with training(bed, "pair", corpus, tmp_path) as before:
        cut_at = time.time()
        bed.network.between("n1", "n2", cut=True)
        bed.client.until("an incident is over", lambda: [i for i in new_incidents(bed, known) if i["restored_at"]])
        (incident,) = new_incidents(bed, known)
        assert (incident["kind"], incident["severity"], incident["node"]) == ("unreachable", "SEV1", "n2")
        assert at(incident, "restored_at") - cut_at < FOUND_S
        task = bed.client.until_step("pair", before["step"] + 4)
        assert {rank["node"] for rank in task["ranks"]} == {"n0", "n1"}
