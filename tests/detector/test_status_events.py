"""Events of progress: checkpoints, results, rates, the kind of a node."""

from __future__ import annotations

from typing import Any

from services.detector.decisions.status_events import node_joined
from shared.events.union import TaskCheckpointed, TaskCheckpointFailed, TaskCopiesLacking, TaskFinished, TaskProgressed
from shared.messages.signals import Heartbeat, RankCheckpointed, RankCheckpointFailed, RankCopies, RankFinished
from tests.detector.kit import START, Cluster, at, moved, only_error, restart_plan


def test_a_node_joins_with_its_kind() -> None:
    heartbeat = Heartbeat(
        node="n0",
        incarnation="i",
        agent_pid=1,
        sequence=1,
        sent_at=START,
        interval_s=0.25,
        hardware="h100",
        workers=[],
    )
    assert node_joined(heartbeat, "i", START).hardware == "h100"


def test_checkpoints_and_results_count_only_in_the_current_generation() -> None:
    cluster = Cluster()
    about: dict[str, Any] = {**cluster._about("n0/0", 1.0, 20), "path": "/c"}
    old = RankCheckpointed.model_validate({**about, "generation": 0})
    assert cluster.signal(old, 1.0) == []
    kept = cluster.signal(RankCheckpointed.model_validate(about), 1.0)
    assert [type(e) for e in kept] == [TaskCheckpointed]
    done = {**cluster._about("n0/0", 2.0, 100), "samples_sha256": "ab", "parameters_path": "/p", "loss": 1.0}
    finished = cluster.signal(RankFinished.model_validate(done), 2.0)
    assert [type(e) for e in finished] == [TaskFinished]
    assert cluster.signal(RankFinished.model_validate(done), 2.1) == []


def test_a_checkpoint_is_recorded_once_although_its_repeat_has_another_time() -> None:
    cluster = Cluster()
    ahead = {**cluster._about("n0/0", 9.0, 20), "path": "/c"}  # the node's clock is ahead of the monitor's
    saved = RankCheckpointed.model_validate(ahead)
    [event] = cluster.signal(saved, 1.0)
    assert event.occurred_at == at(1.0)
    assert cluster.signal(saved, 1.1) == []
    assert cluster.signal(saved.model_copy(update={"signal_id": "another", "occurred_at": at(1.2)}), 1.3) == []
    next_one = saved.model_copy(update={"step": 21, "path": "/d"})
    assert [e.step for e in cluster.signal(next_one, 1.4)] == [21]
    error = only_error(cluster.signal(cluster.exited("n1/0", 2.0), 2.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert cluster.signal(saved, 2.1) == []
    cluster.fold(moved("p2", 2, "resumed"), moved("p2", 3, "restored"))
    for generation in (2, 3):
        later = saved.model_copy(update={"generation": generation})
        assert len(cluster.signal(later, 3.0)) == 1
        assert cluster.signal(later, 3.1) == []


def test_of_a_run_of_failed_checkpoints_the_log_has_each_kind_once() -> None:
    cluster = Cluster()

    def failed(worker: str, now: float, step: int, reason: str) -> list[str]:
        about = {**cluster._about(worker, now, step), "reason": reason}
        events = cluster.signal(RankCheckpointFailed.model_validate(about), now)
        assert all(isinstance(event, TaskCheckpointFailed) for event in events)
        return [f"{event.worker} {event.step} {event.reason}" for event in events]

    full = "OSError: [Errno 28] No space left on device: '/c/.step-{}.partial'"
    assert failed("n0/0", 1.0, 20, full.format(20)) == [f"n0/0 20 {full.format(20)}"]
    assert failed("n0/0", 1.0, 20, full.format(20)) == []  # the signal is repeated
    assert failed("n1/0", 1.1, 20, full.format(20)) == []  # another rank, the same failure
    assert failed("n0/0", 2.0, 25, full.format(25)) == []  # the next checkpoint
    assert failed("n0/0", 3.0, 30, "gone") == ["n0/0 30 gone"]
    assert failed("n0/0", 4.0, 35, full.format(35)) == []
    saved = {**cluster._about("n0/0", 5.0, 40), "path": "/c"}
    assert len(cluster.signal(RankCheckpointed.model_validate(saved), 5.0)) == 1
    assert failed("n0/0", 6.0, 45, full.format(45)) == [f"n0/0 45 {full.format(45)}"]
    random = [failed("n0/0", 7.0, 50, f"cannot write {chr(ord('a') + n)}") for n in range(26)]
    assert 1 < sum(len(events) for events in random) < 10  # whatever the reasons are, the log stays short


def test_the_log_has_each_lack_of_copies_once_until_all_are_there_again() -> None:
    cluster = Cluster()

    def said(worker: str, now: float, step: int, lack: str) -> list[tuple[str, int, str, bool]]:
        about = {**cluster._about(worker, now, step), "lack": lack}
        events = cluster.signal(RankCopies.model_validate(about), now)
        assert all(isinstance(event, TaskCopiesLacking) for event in events)
        return [(event.worker, event.step, event.reason, event.ended) for event in events]

    gone = "in-memory copies are gone from /dev/shm/unicron-{}"
    assert said("n0/0", 0.5, 10, "") == []  # the generation's first copies
    assert said("n0/0", 1.0, 20, gone.format(1)) == [("n0/0", 20, gone.format(1), False)]
    assert said("n0/0", 1.0, 20, gone.format(1)) == []  # the signal is repeated
    assert said("n1/0", 1.1, 20, gone.format(2)) == []  # those of another node as well
    assert said("n0/0", 2.0, 21, "") == [("n0/0", 21, "", True)]
    assert said("n0/0", 2.0, 21, "") == []
    assert said("n1/0", 2.1, 20, "no room") == []  # it was made good before it was heard of
    assert said("n1/0", 3.0, 30, "no room") == [("n1/0", 30, "no room", False)]
    failed = {**cluster._about("n0/0", 4.0, 40), "reason": "no room"}
    assert len(cluster.signal(RankCheckpointFailed.model_validate(failed), 4.0)) == 1  # a checkpoint is another matter


def test_progress_is_summarised_when_a_rate_is_known_and_then_at_intervals() -> None:
    cluster = Cluster()
    events = []
    for step in range(1, 61):
        now = step * 0.25
        copies = {"memory_every": 8, "replicated": True} if step > 10 else {}
        decision = cluster.beat(
            "n0", now, step=step, step_s=0.2 if step % 3 else 0.4, steps_timed=step, loss=2.0, **copies
        )
        events += [(now, e) for e in decision.events]
    assert all(isinstance(e, TaskProgressed) for _, e in events)
    assert [now for now, _ in events] == [0.5, 5.5, 10.5]
    assert events[-1][1].step_s == 0.2
    assert (events[-1][1].workers, events[-1][1].loss) == (3, 2.0)
    assert (events[-1][1].memory_every, events[-1][1].replicated) == (8, True)
    assert "memory_every" not in events[0][1].canonical(), "what no rank has said stays out of the log"
