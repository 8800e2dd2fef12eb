"""Collectives and aborts exclude each other, whatever thread they are on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from unicron.errors import CommunicationFailed
from unicron.link import issuing

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    issuing.forget()


class Group:
    """A process group that notes what is issued, and may be made to block in it."""

    def __init__(self) -> None:
        self.issued = 0
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def size(self) -> int:
        return 2

    def allreduce(self) -> int:
        self.entered.set()
        assert self.may_end.wait(LIMIT_S)
        self.issued += 1
        return self.issued


def guarded() -> Group:
    group = Group()
    issuing.guard([group])
    return group


def test_a_group_issues_as_before() -> None:
    group = guarded()
    issuing.guard([group])  # once for each type
    assert group.allreduce() == 1
    assert group.issued == 1


def test_nothing_is_issued_during_an_abort_and_nothing_to_the_aborted_group_afterwards() -> None:
    aborted, other = guarded(), Group()
    refused: list[BaseException] = []

    def issue() -> None:
        other.allreduce()
        try:
            aborted.allreduce()
        except CommunicationFailed as err:
            refused.append(err)

    with issuing.while_aborting([aborted]):
        thread = threading.Thread(target=issue)
        thread.start()
        assert not other.entered.wait(0.05), "the thread waits at the first of the two"
    thread.join(LIMIT_S)
    assert (aborted.issued, other.issued, len(refused)) == (0, 1, 1)


def test_an_abort_does_not_wait_for_long_for_a_thread_that_is_blocked_in_a_collective() -> None:
    group = guarded()
    group.may_end.clear()
    thread = threading.Thread(target=group.allreduce)
    thread.start()
    assert group.entered.wait(LIMIT_S)
    with issuing.while_aborting([group]):
        group.may_end.set()  # as an abort ends the collective
        thread.join(LIMIT_S)
    assert group.issued == 1
    with pytest.raises(CommunicationFailed):
        group.allreduce()
