"""When a process that has ended is started again."""

from __future__ import annotations

from services.agent.succession.restarts import MAX_RESTARTS, WINDOW_S, Restarts


def test_the_pauses_grow_until_there_is_no_restart_any_more() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(float(number)) for number in range(MAX_RESTARTS)] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert restarts.pause_s(float(MAX_RESTARTS)) is None


def test_restarts_that_are_long_past_do_not_count() -> None:
    restarts = Restarts()
    for number in range(MAX_RESTARTS):
        assert restarts.pause_s(float(number)) is not None
    assert restarts.pause_s(WINDOW_S + 2.5) == 2.0  # those at 0, 1 and 2 s do not count any more
    assert restarts.pause_s(10 * WINDOW_S) == 0.0
