"""A history with tasks in every state, incidents open and closed, stops, costs of several days, and settled time."""

from __future__ import annotations

from pathlib import Path

from shared.archive.backup import back_up
from shared.events.plans import TaskChange
from shared.events.union import (
    AnomalyObserved,
    FaultInjected,
    IncidentAcknowledged,
    IncidentNoted,
    NodeCordoned,
    NodeDrained,
    NodeDraining,
    NodeLeft,
    Recorded,
    TaskChanged,
    TaskCheckpointed,
    TaskCheckpointFailed,
    TaskDeleted,
    TaskFailed,
    TaskFinished,
    TaskStarving,
    TaskStopped,
    TaskStopRefused,
    TaskStopRequested,
    TroubleAcknowledged,
    TroubleEnded,
    WorkerSlowed,
)
from tests.api.kit import Story, stage

DAY_S = 86_400.0

FAULTS = 24
"""Of one task: enough changed plans and spans for time to be settled."""

WORKERS = ["n0/0", "n0/1", "n1/0", "n1/1"]

DETAIL = "a rank printed \x00, \N{SNOWMAN} and 'quotes'"
"""Text that a database may take for something else."""


def whole_history(folder: Path) -> list[Recorded]:
    """Write the history into the log ``folder / "story.db"``, and as a backup to ``folder / "backup"``."""
    story = Story(folder / "story.db")
    story.running()
    for number in range(FAULTS):
        story.process_exit(f"i{number}", f"p{number}").process_restored(f"i{number}", f"p{number}")
    _nodes(story)
    for index, write in enumerate((_waiting, _changing, _stopping, _ended)):
        write(story, 1000 + 100 * index)
    _seen(story, 2000)
    story.at(3 * DAY_S).progress("gpt", 99, 1.0, generation=3)
    back_up(story.log, folder / "backup")
    story.log.close()
    return story.records


def _nodes(story: Story) -> None:
    story.at(500)
    for number in range(2, 6):
        story.node(f"n{number}")
    story.add(NodeCordoned, node="n2", reason=DETAIL)
    story.add(NodeDraining, node="n3", by="user", timeout_s=60.0)
    story.add(NodeDraining, node="n4", by="user", timeout_s=60.0)
    story.add(NodeDrained, node="n4")
    story.add(NodeLeft, node="n5", incarnation=story.records[-1].event.event_id, reason="asked to end")


def _move(task: str) -> TaskChange:
    target = stage(1, WORKERS, source="initial")
    return TaskChange(task=task, reason="submitted", action="move", from_generation=0, prepare=WORKERS, target=target)


def _start(story: Story, task: str) -> None:
    story.submit(task)
    story.plan(f"start-{task}", _move(task))
    sources = dict.fromkeys(WORKERS, "initial")
    story.moved(f"start-{task}", task, "restored", 1, step=1, sources=sources, complete=True)
    story.progress(task, 9, 1.0)


def _ask_to_stop(story: Story, task: str) -> None:
    story.add(TaskStopRequested, task=task, actor="uid/1000")
    story.plan(f"stop-{task}", TaskChange(task=task, reason="asked to stop", action="stop", from_generation=1))


def _waiting(story: Story, at_s: float) -> None:
    story.at(at_s).submit("pending")
    story.submit("queued")
    story.plan("no-room", queued={"queued": "no workers"})
    story.at(at_s + 60).add(TaskStarving, task="queued", since=story.time(at_s))


def _changing(story: Story, at_s: float) -> None:
    story.at(at_s).submit("transitioning")
    story.plan("begun", _move("transitioning"))
    _start(story, "degraded")
    story.process_exit("open", "answer", "degraded")
    story.at(at_s + 50).add(TaskChanged, task="degraded", weight=2.5, min_workers=1, max_workers=4)


def _stopping(story: Story, at_s: float) -> None:
    story.at(at_s)
    for task in ("stopping", "refused", "stopped", "deleted", "again"):
        _start(story, task)
        story.add(TaskCheckpointed, task=task, generation=1, step=5, path=f"/shared/{task}/step-5")
        _ask_to_stop(story, task)
    failure = {"generation": 1, "step": 9, "reason": DETAIL}
    story.add(TaskCheckpointFailed, task="refused", worker="n0/0", **failure)
    story.add(TaskStopRefused, task="refused", plan="stop-refused", **failure)
    for task in ("stopped", "deleted", "again"):
        story.add(TaskStopped, task=task, generation=1, step=9, path=f"/shared/{task}/step-9")
    story.add(TaskDeleted, task="deleted")
    story.submit("again")


def _ended(story: Story, at_s: float) -> None:
    story.at(at_s)
    for task in ("succeeded", "failed", "failed-again"):
        _start(story, task)
    result = {"samples_sha256": "a", "parameters_path": "/p", "worker": "n0/0"}
    story.add(TaskFinished, task="succeeded", generation=1, step=100, loss=1.5, **result)
    for task in ("failed", "failed-again"):
        place = {"node": "n0", "worker": "n0/0", "rank": 0, "generation": 1, "step": 9}
        story.error(f"of-{task}", at_s, task=task, evidence={"traceback": DETAIL}, **place)
        story.add(TaskFailed, task=task, generation=1, step=9, reason=DETAIL, traceback=DETAIL, incident=f"of-{task}")


def _seen(story: Story, at_s: float) -> None:
    story.at(at_s).add(IncidentNoted, incident="i1", text=DETAIL)
    story.add(IncidentAcknowledged, incident="i1")
    story.add(TroubleAcknowledged, key="queue", what="patient waits for workers", actor="uid/9")
    story.add(TroubleEnded, key="queue")
    story.add(FaultInjected, task="gpt", rank=2, fault="hang")
    regression = {"kind": "throughput-regression", "generation": 3, "step": 97, "value": 2.0, "expected": 1.0}
    story.add(AnomalyObserved, task="gpt", detected_at=story.time(), **regression)
    for number, slowdown in enumerate((2.0, 1.0, 1.5)):
        slow = {"node": "n1", "worker": "n1/0", "task": "gpt", "generation": 3, "rank": 2, "step": 97}
        story.at(at_s + 100 * number).add(WorkerSlowed, event_id=f"slow-{number}", slowdown=slowdown, **slow)
