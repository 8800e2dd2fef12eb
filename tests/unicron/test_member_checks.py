"""When the members of a generation keep the state that they begin with, and what they then know of an update."""

from __future__ import annotations

from typing import Any

import pytest

from unicron.join import own_identity
from unicron.join.agreement import Report
from unicron.join.member_checks import MemberChecks


def report(**fields: Any) -> Report:
    return Report(coordinate=(0, 0), partial=0, **fields)


def no_collective(work: object) -> None:
    raise AssertionError("members with one identity have nothing to tell each other")


def survivor(**fields: Any) -> Report:
    return report(proven=True, complete=4, **fields)


def newcomer(**fields: Any) -> Report:
    return report(**fields)


CASES = {
    "all are new": ([newcomer(), newcomer()], False),
    "nobody is new": ([survivor(), survivor()], False),
    "a newcomer takes its state": ([survivor(), newcomer()], True),
    "a newcomer has trained on what it has": ([survivor(), newcomer(complete=4)], False),
    "one of two newcomers has": ([survivor(), newcomer(), newcomer(complete=4)], False),
    "a newcomer that is gone had a part in the update": ([survivor(uncompared=True), newcomer()], False),
    "the update is undone": ([survivor(uncompared=True, undoes=True), survivor(uncompared=True), newcomer()], True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_kept_that_no_newcomer_has_had_a_part_in(case: str) -> None:
    reports, keeps = CASES[case]
    checks = MemberChecks(own_identity.of_task({}))
    checks.enter(reports, {}, no_collective)
    assert checks.keeps_state is keeps


@pytest.mark.parametrize("undoes", [True, False])
def test_what_is_known_of_an_update_holds_until_the_members_have_agreed_on_a_state(undoes: bool) -> None:
    """Also on a rank that has not learnt that a member differs."""
    checks = MemberChecks(own_identity.of_task({}))
    checks.uncompared = True
    checks.begin([survivor(uncompared=True), survivor(uncompared=True, undoes=undoes)])
    assert checks.uncompared is not undoes
    assert not checks.undoes
