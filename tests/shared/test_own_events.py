"""Every event is folded exactly once, at its decision or at its delivery, however deliveries and appends interleave."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from shared.events.union import TaskStopRequested, derived_id
from shared.log.own_events import OwnEvents
from shared.model import utc_now

AT = utc_now()


def event(event_id: str) -> TaskStopRequested:
    return TaskStopRequested(event_id=event_id, occurred_at=AT, task="a")


@dataclass
class Service:
    """Answers each foreign event with as many events as the event's id says, folded before they are appended."""

    log: list[TaskStopRequested]
    own: OwnEvents = field(default_factory=OwnEvents)
    folded: list[str] = field(default_factory=list)
    position: int = 0

    def deliver(self) -> None:
        """Take the next event of the log, if there is one."""
        if self.position == len(self.log):
            return
        delivered = self.log[self.position]
        self.position += 1
        if self.own.skip(delivered):
            return
        self.folded.append(delivered.event_id)
        _, _, answers = delivered.event_id.partition("/")
        decided = [event(derived_id(delivered.event_id, "service", index)) for index in range(int(answers or 0))]
        self.folded += [answer.event_id for answer in decided]
        self.own.add(decided)
        self.log += decided


@given(st.lists(st.none() | st.integers(0, 3), max_size=30))
def test_each_event_is_folded_once_and_answers_follow_their_cause(course: list[int | None]) -> None:
    """``course``: None delivers the next event; a number appends a foreign event with that many answers."""
    log: list[TaskStopRequested] = []
    service = Service(log)
    for number, answers in enumerate(course):
        if answers is None:
            service.deliver()
        else:
            log.append(event(f"{number}/{answers}"))
    while service.position < len(log):
        service.deliver()
    assert len(service.own) == 0
    assert sorted(service.folded) == sorted(entry.event_id for entry in log)
    causes = [entry.event_id for entry in log if "/" in entry.event_id]
    assert service.folded == [
        folded
        for cause in causes
        for folded in (cause, *(derived_id(cause, "service", i) for i in range(int(cause.partition("/")[2]))))
    ]


def test_an_event_that_comes_again_is_skipped_once_only() -> None:
    own = OwnEvents()
    own.add([event("a"), event("b")])
    assert [own.skip(event(name)) for name in ("b", "b", "c", "a")] == [True, False, False, True]
    assert len(own) == 0
