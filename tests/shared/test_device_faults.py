"""The table of faults of devices."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from shared.events.device_faults import CONDITIONS, CONTAINMENT_XIDS, device_fault, known, of_xid
from shared.events.severities import Severity

TABLE: dict[str, Any] = json.loads(files("shared").joinpath("xid.json").read_text())
SEV1, SEV2 = Severity.SEV1, Severity.SEV2


@pytest.mark.parametrize(
    ("xid", "severity"),
    [(79, SEV1), (48, SEV1), (64, SEV1), (74, SEV1), (95, SEV1), (119, SEV1), (94, SEV2), (109, SEV2), (32, SEV2)],
)
def test_a_code_that_breaks_the_work_has_a_severity(xid: int, severity: Severity) -> None:
    assert device_fault(of_xid(xid)).severity is severity


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 92, 144, 154, 9999])
def test_a_code_that_breaks_nothing_by_itself_is_recorded_only(xid: int) -> None:
    fault = device_fault(of_xid(xid))
    assert (fault.name, fault.severity) == (f"xid-{xid}", None)
    assert fault.response.startswith("Recorded")


def test_every_condition_has_an_entry_and_every_entry_a_response() -> None:
    assert set(CONDITIONS) <= set(known())
    assert all(device_fault(name).response and device_fault(name).meaning for name in known())
    assert {of_xid(code) for code in CONTAINMENT_XIDS} <= set(known())
    codes = [entry["code"] for entry in TABLE["xids"]]
    assert codes == sorted(set(codes))


def test_where_sources_recommend_more_than_the_table_does_it_says_why() -> None:
    """A reset by NVIDIA is SEV1, and a restart of the application SEV2, unless the entry gives the reason."""
    expected = {"RESET_GPU": "SEV1", "RESTART_BM": "SEV1", "RESTART_VM": "SEV1", "RESTART_APP": "SEV2"}
    for entry in TABLE["xids"]:
        wanted = expected.get(entry["sources"].get("nvidia", ""))
        if wanted is not None and entry["severity"] != wanted:
            assert entry.get("why"), entry
        if entry["sources"].get("azure") == "drain" and entry["severity"] is None:
            assert entry.get("why"), entry
    assert set(TABLE["sources"]) >= {source for entry in TABLE["xids"] for source in entry["sources"]}
