"""The limits of evidence are the same where a process sends it and where it is stored."""

from __future__ import annotations

from shared.events import evidence
from unicron.link import flight_record, reporting


def test_a_training_process_keeps_the_limits_of_the_services() -> None:
    assert reporting.TRACEBACK_CHARACTERS == evidence.TRACEBACK_CHARACTERS
    assert reporting.DETAIL_CHARACTERS == evidence.DETAIL_CHARACTERS
    assert flight_record.MOST_GROUPS == evidence.COLLECTIVE_GROUPS
    assert flight_record.MOST_WAITS == evidence.OPERATIONS
