"""Processes that fail as they start: what failed decides, and whether it follows the task or the node."""

from __future__ import annotations

from typing import Any

import pytest

from shared.events.plans import Response, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, NodeReturned, TaskFailed, TaskSubmitted
from shared.messages.signals import RankRaised
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import START, Cluster, at, moved, plan, restart_plan

EIO = "[Errno 5] Input/output error: '/scratch/shard-0001.bin'"


class Starts:
    """A cluster in which processes fail as they start; ``task`` trains in generation 1, on each node one rank."""

    def __init__(self, nodes: int = 3, *, max_restarts: int = 3) -> None:
        self.cluster = Cluster(nodes, max_restarts=max_restarts)
        self.now_s = 1.0
        self.generation = {"gpt": 1}

    def submit(self, task: str) -> None:
        """Have another task train on the same nodes."""
        cluster = self.cluster
        spec = parse_spec({**SPEC, "name": task})
        cluster.fold(TaskSubmitted(event_id=task, occurred_at=START, task=task, spec=spec))
        first = stage(1, cluster.workers, source="initial")
        change = TaskChange(
            task=task, reason="new", action="move", from_generation=0, target=first, prepare=cluster.workers
        )
        cluster.fold(plan(f"first of {task}", task, change, response=Response.RECONFIGURE))
        cluster.fold(moved(f"first of {task}", 1, "restored", task=task, complete=True))
        self.generation[task] = 1

    def killed(self, worker: str, *, task: str = "gpt") -> Any:
        """Somebody kills a rank, and its restart begins."""
        signal = self.cluster.exited(worker, self.now_s, task=task, generation=self.generation[task])
        return self._answered(worker, self.cluster.signal(signal, self.now_s), task)

    def raises(self, worker: str, error: str, detail: str, *, task: str = "gpt") -> Any:
        """The process that was started raises; return the event, whose answer begins."""
        fields = self.cluster.raised(
            worker, self.now_s, "exception", task=task, generation=self.generation[task] - 1, step=0
        ).model_dump()
        text = f"Traceback ...\n{error}: {detail}\n"
        signal = RankRaised.model_validate({**fields, "error": error, "detail": detail, "traceback": text})
        return self._answered(worker, self.cluster.signal(signal, self.now_s), task)

    def exits(self, worker: str, code: int) -> Any:
        """The process that was started ends; return the event, whose answer begins."""
        signal = self.cluster.exited(worker, self.now_s, code=code, step=0, generation=self.generation["gpt"] - 1)
        return self._answered(worker, self.cluster.signal(signal, self.now_s), "gpt")

    def hangs(self, worker: str) -> Any:
        """The process that was started is found stopped; return the event, whose answer begins."""
        cluster, node = self.cluster, worker.partition("/")[0]
        for quarter in range(1, 40):
            now_s = self.now_s + quarter / 4
            cluster.monitor.echo(at(now_s))
            for name in cluster.names:
                fields: dict[str, Any] = {"state": "waiting", "phase": "waiting"}
                if name == node:
                    fields = {"state": "ready", "phase": None, "process_state": "T", "progress_age_s": None}
                    fields |= {"generation": self.generation["gpt"] - 1, "pid": 100 + self.generation["gpt"]}
                cluster.beat(name, now_s, **fields)
            if events := [event for event in cluster.tick(now_s) if isinstance(event, ErrorDetected | NodeReturned)]:
                self.now_s = now_s
                return self._answered(worker, events, "gpt")
        raise AssertionError("it was not found")

    def move(self, error: ErrorDetected, worker: str) -> None:
        """A new plan for the cluster has another worker take the place of the one that was given up."""
        workers = [w for w in self.cluster.workers if w != error.worker]
        generation = self.generation["gpt"]
        change = TaskChange(
            task="gpt", reason="moved", action="move", from_generation=generation, hold=True,
            survivors=[w for w in workers if w != worker], prepare=[worker],
            interrupted=stage(generation + 1, [w for w in workers if w != worker], kind="interrupted"),
            target=stage(generation + 2, workers, source="live"),
        )  # fmt: skip
        self.cluster.fold(plan(f"to {worker}", error.event_id, change, response=Response.RECONFIGURE))
        self.generation["gpt"] += 2

    def _answered(self, worker: str, events: list[Any], task: str) -> Any:
        self.now_s += 1.0
        event, self.further = events[0], events[1:]
        if isinstance(event, ErrorDetected) and event.severity is Severity.SEV2:
            generation = self.generation[task]
            survivors = [w for w in self.cluster.workers if w != worker]
            interrupted = stage(generation + 1, survivors, kind="interrupted") if survivors else None
            change = TaskChange(
                task=task, reason="restart", action="move", from_generation=generation, survivors=survivors,
                failed=[worker], hold=True, interrupted=interrupted,
                prepare=[worker], target=stage(generation + 2, self.cluster.workers, source="live"),
            )  # fmt: skip
            self.cluster.fold(plan(f"answer to {event.event_id}", event.event_id, change))
            self.generation[task] += 2
        return event


def test_what_a_program_says_as_it_starts_ends_its_task_and_isolates_no_node() -> None:
    found = Starts()
    first = found.killed("n1/0")
    failures = [found.raises("n1/0", "ValueError", "cannot reshape array of size 7") for _ in range(4)]
    assert [event.severity for event in failures[:3]] == [Severity.SEV2] * 3
    assert (failures[0].incident, failures[0].escalates) == (first.incident, first.event_id)
    assert failures[0].evidence["repetition"]["not_isolated"] == "what failed says nothing of the machine"
    assert isinstance(failures[3], TaskFailed)
    assert failures[3].reason.endswith("ValueError: cannot reshape array of size 7")
    assert found.cluster.monitor.state.condemned == {}


@pytest.mark.parametrize("code", [-9, -15])
def test_a_process_that_somebody_kills_as_it_starts_isolates_no_node(code: int) -> None:
    found = Starts()
    found.killed("n1/0")
    event = found.exits("n1/0", code)
    assert event.severity is Severity.SEV2
    assert event.evidence["repetition"]["not_isolated"] == "somebody has ended the process"


@pytest.mark.parametrize(
    ("error", "detail", "kind"),
    [
        ("OSError", EIO, ErrorKind.EXCEPTION),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", ErrorKind.DEVICE),
        ("RuntimeError", "CUDA driver error: unknown error", ErrorKind.EXCEPTION),
    ],
)
def test_a_start_that_fails_because_of_the_machine_isolates_it(error: str, detail: str, kind: ErrorKind) -> None:
    found = Starts()
    found.killed("n1/0")
    event = found.raises("n1/0", error, detail)
    assert (event.kind, event.severity, event.node) == (kind, Severity.SEV1, "n1")
    assert list(found.cluster.monitor.state.condemned) == ["n1"]


def test_an_error_of_storage_that_other_nodes_have_as_well_isolates_none() -> None:
    found = Starts()
    found.killed("n1/0")
    for worker in ("n1/0", "n2/0"):
        signal = found.cluster.raised(worker, 1.0, "exception", generation=1)
        fields = {**signal.model_dump(), "error": "OSError", "detail": EIO}
        found.cluster.signal(RankRaised.model_validate(fields), 1.0)
    event = found.raises("n1/0", "OSError", EIO)
    assert event.severity is Severity.SEV2
    assert event.evidence["repetition"]["follows_task_on"] == ["n2"]


def test_a_node_that_alone_fails_two_tasks_is_isolated_whatever_they_say() -> None:
    found = Starts()
    found.submit("bert")
    found.killed("n1/0")
    assert found.raises("n1/0", "ValueError", "it is broken").severity is Severity.SEV2
    found.killed("n1/0", task="bert")
    event = found.raises("n1/0", "KeyError", "it is broken, too", task="bert")
    assert (event.severity, event.node, event.evidence["rule"]) == (Severity.SEV1, "n1", "starts")
    assert event.evidence["repetition"] == {"cause": "exception/KeyError", "also_failed": ["gpt"]}


def test_two_tasks_that_fail_on_several_nodes_isolate_none() -> None:
    found = Starts()
    found.submit("bert")
    for worker in ("n1/0", "n2/0"):
        found.killed(worker)
        assert found.raises(worker, "ValueError", "it is broken").severity is Severity.SEV2
    found.killed("n1/0", task="bert")
    assert found.raises("n1/0", "ValueError", "it is broken", task="bert").severity is Severity.SEV2
    assert found.cluster.monitor.state.condemned == {}


def test_a_hang_that_follows_the_task_costs_no_second_node_and_gives_the_first_one_back() -> None:
    found = Starts(4, max_restarts=9)
    found.killed("n1/0")
    first = found.hangs("n1/0")
    assert (first.kind, first.severity, first.node) == (ErrorKind.HANG, Severity.SEV1, "n1")
    found.move(first, "n2/0")
    second = found.hangs("n2/0")
    assert (second.kind, second.severity, second.node) == (ErrorKind.HANG, Severity.SEV2, "n2")
    assert [(event.type, event.node, event.actor) for event in found.further] == [("node.returned", "n1", "detector")]
    assert isinstance(found.further[0], NodeReturned)
    assert {"n1", "n2"} <= found.cluster.monitor.state.causes.starts.keys()
    again = found.hangs("n2/0")
    assert again.severity is Severity.SEV2
    assert found.cluster.monitor.state.condemned == {}


@pytest.mark.parametrize(
    ("error", "detail", "class_"),
    [
        ("OSError", "[Errno 24] Too many open files; this process lacks open files: 128 at most", "open-files"),
        ("RuntimeError", "can't start new thread", "threads"),
        ("OSError", "[Errno 98] Address already in use", "ports"),
    ],
)
def test_a_rank_that_says_what_it_lacks_is_to_blame_and_its_node_is_not(error: str, detail: str, class_: str) -> None:
    """A survivor has no descriptor left for the groups in which the newcomer takes part."""
    found = Starts()
    found.killed("n1/0")
    signal = found.cluster.raised("n0/0", 2.0, "exception", generation=3)
    fields = {**signal.model_dump(), "error": error, "detail": detail, "resource": "it", "limit": "128 at most"}
    (event,) = found.cluster.signal(RankRaised.model_validate(fields), 2.0)
    assert (event.severity, event.worker, event.evidence["class"]) == (Severity.SEV2, "n0/0", class_)
    assert (event.evidence["resource"], event.evidence["limit"]) == ("it", "128 at most")
    failed = moved("answer", 3, "failed", code="rank-raised", failed_workers=["n1/0"], detail=f"rank-raised: {detail}")
    assert found.cluster.fold(failed).events == [], "what n0 said explains it"
    assert found.cluster.monitor.state.condemned == {}


def test_the_last_node_is_not_isolated_for_a_start_that_failed() -> None:
    found = Starts(1)
    found.killed("n0/0")
    event = found.raises("n0/0", "OSError", EIO)
    assert event.severity is Severity.SEV2
    assert event.evidence["repetition"]["not_isolated"] == "it is the last node of kind cpu"


def test_a_plan_that_failed_since_a_process_raised_is_judged_by_what_it_said() -> None:
    for detail, severity in (("rank-raised: ValueError: no", Severity.SEV2), (f"rank-raised: {EIO}", Severity.SEV1)):
        cluster = Cluster()
        error = cluster.signal(cluster.exited("n1/0", 1.0), 1.0)[0]
        restart_plan("p2", error, cluster, "n1/0")
        failed = moved("p2", 3, "failed", code="process-exited", failed_workers=["n1/0"], detail=detail)
        events = cluster.fold(failed).events
        assert [(event.severity, event.evidence["code"]) for event in events] == [(severity, "process-exited")]
