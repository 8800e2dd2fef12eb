"""Waiting for a collective in slices."""

from __future__ import annotations

from datetime import timedelta

import pytest

from unicron.link.waiting import has_ended


class LateWork:
    """A collective that ends just after the first slice of the wait for it."""

    def __init__(self, error: str = "") -> None:
        self.ended = False
        self.error = error

    def wait(self, slice_: timedelta | None = None) -> None:
        if not self.ended:
            assert slice_ is not None
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.ended


def test_a_collective_that_ends_just_after_a_slice_has_not_failed() -> None:
    assert has_ended(LateWork())


def test_the_error_of_the_collective_is_raised() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        has_ended(LateWork("Connection closed by peer"))


def test_a_collective_that_goes_on_has_not_ended() -> None:
    class Endless(LateWork):
        def is_completed(self) -> bool:
            return False

    assert not has_ended(Endless())
