"""Restarts of the service: it folds the log, sends the unfinished commands again, and repeats nothing that is done."""

from __future__ import annotations

from tests.transition.drive import Drive, restart_change


def test_restart_at_any_moment_goes_on_where_the_log_ends() -> None:
    """The unfinished commands are sent again with the same ids; phases that are done stay done."""
    d = Drive()
    d.plan("p", restart_change())
    while d.waiting:
        twin = d.restarted()
        twin.answer_all()
        assert set(d.waiting) <= {s.command.command_id for s in twin.sent}
        assert sorted(twin.phases()) == ["drained", "held", "prepared", "restored", "resumed"]
        assert twin.moved[-1].complete
        d.reply(next(iter(d.waiting.values())))
    assert d.restarted().sent == []


def test_restart_does_not_repeat_what_later_commands_have_overtaken() -> None:
    d = Drive()
    d.plan("p", restart_change())
    while "drained" not in d.phases():
        d.reply(next(iter(d.waiting.values())))
    twin = d.restarted()
    assert {s.command.kind for s in twin.sent} == {"open-store"}
    assert twin.sent[0].command.generation == 3
