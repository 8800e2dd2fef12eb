"""A course: a task on a backend that behaves as NCCL does (``tests.unicron.contract``), its faults, how it heals."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.condition import until
from tests.parity.courses import TaskLayout
from tests.unicron.conftest import MODEL, SpecFile, largest_difference
from tests.unicron.contract import settings
from tests.unicron.contract.group import OF_ONE_RANK
from tests.unicron.contract.watchdog import WAITS_FOR_WATCHDOG, WATCHDOG_SAW
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.test_snapshots import Nodes
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.protocol.environment import BUCKET_BYTES
from unicron.protocol.messages import Finished, Held, Hold, Raised, Resumed

STEP = 3
"""Of the first fault."""
BETWEEN = 2
"""Steps, from one fault to the next."""
AHEAD = 3
"""Micro-batches by which hosts are ahead of their devices at least, where they are."""
TOLERANCE = 1e-6
"""Of parameters after a few steps, where float32 numbers are added up in another order."""
SHARDED: dict[str, Any] = {
    "parallel": {"distributed_optimizer": True, "overlap": True},
    "exact": False,
    "optimizer": {"eps": 1e-3},
    "checkpoint": {"every": 0, "memory_every": BETWEEN},
}
"""The distributed optimizer with both overlaps, and copies in memory of the step before each fault. Adam with its usual
epsilon makes whole steps of the rounding where a gradient is zero."""
BUCKET = "20000"
"""Bytes: of such buckets the model has several."""
POLL_S = 0.01
"""Between two looks at a file."""
SCALE = 0.02
"""Of torch's times: its watchdog's minute is a second here."""
BEATS = {settings.TIME_SCALE: str(SCALE), "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}
STEPS_BEHIND = 12
"""Steps behind the last fault: they take longer than ``LIVES_S``, in which a survivor shows that nothing ends it."""
LATE_STEPS_BEHIND = 3
"""The same where devices are late and a peer's death does not show: these few take about four times ``LIVES_S``."""
LIVES_S = 30 * SCALE
"""How long a survivor lives at least, of three heartbeats of torch's monitor."""
STUCK = {"UNICRON_FINISH_FLOOR_S": "3"}
"""How long a spared rank waits for one of its replica that has left: nothing else ends a collective of NCCL then."""
CONTRACT = (
    BEATS
    | STUCK
    | {settings.MAKE_S: "0.02", settings.ABORT_S: "0.3", settings.NOTICE_S: "0.1", settings.LEAVES_S: "0.2"}
)


NCCL = "nccl"
"""The mode of a course that runs on devices (``tests.unicron.test_gpu``), not on the contract backend."""


@dataclass(frozen=True, slots=True)
class CourseFault:
    """What happens to whom. All victims are in the same step."""

    at: str
    """The fault point, see ``unicron.process.faults``."""
    kind: str
    """``kill``, ``exception``, ``sleep`` or ``communication``; where the optimizer is divided not ``exception``."""
    victims: tuple[int, ...] = (1,)
    """Their ranks in the first generation."""

    @property
    def loses_nobody(self) -> bool:
        """Whether the victims leave the generation and go on in the next one, with all others."""
        return self.kind == "communication"

    def __str__(self) -> str:
        return f"{self.kind}-at-{self.at}" + (f"-of-{len(self.victims)}" if len(self.victims) > 1 else "")


@dataclass(frozen=True, slots=True)
class Course:
    """A task, from its start through some faults to its end."""

    layout: TaskLayout
    faults: tuple[CourseFault, ...]
    mode: str = "sockets"
    """How a peer's death shows (``Settings.mode``)."""
    sharded: bool = False
    """Whether the distributed optimizer divides the state, with both overlaps."""
    returns: bool = False
    """Whether a new process takes each lost one's place; otherwise its replica is left out."""
    ahead: bool = False
    """Whether those that wait for a victim learn of it late: on their devices nothing ends any more, and the hosts go
    on to the end of the passes and count micro-batches that use what never came. The fault's point is in the passes, or
    it is ``gather``, which the next step's passes wait for; all parameters are those without a fault, bit for bit."""
    variables: tuple[tuple[str, str], ...] = ()
    """Of the ranks' environment, beside ``CONTRACT``."""

    @property
    def breaks_connections(self) -> bool:
        """Whether a victim's connections end: its process does, or it aborts what it has."""
        return any(fault.kind != "sleep" for fault in self.faults)

    def __str__(self) -> str:
        flags = [*("ahead" for _ in range(self.ahead)), *("returns" for _ in range(self.returns))]
        parts = [str(self.layout), *("sharded" for _ in range(self.sharded)), *map(str, self.faults), self.mode]
        return "-".join([*parts, *flags, *(v for _, v in self.variables)])


DP2, DP3 = TaskLayout(1, 1, 2), TaskLayout(1, 1, 3)
TP, PP = TaskLayout(2, 1, 2), TaskLayout(1, 2, 2)


class Task:
    """A task on the contract backend, and what a planner would do for it."""

    def __init__(self, a: Agent, spec: Path, course: Course, memory: Path) -> None:
        self.agent, self.spec, self.course, self._memory = a, spec, course, memory
        self.layout = course.layout
        self.members = [f"w{rank}" for rank in range(course.layout.size)]
        self._spare = course.layout.size
        self.faulted_at_s = 0.0
        self.more_faults = ""
        """As ``UNICRON_FAIL_AT`` has them, of the workers that begin."""
        self._seen: dict[str, int] = {}
        """``_sightings`` of each member before the present generation."""

    async def begin(self) -> None:
        first = list(self.members)
        faults = [self._fail_at(number) for number in range(len(self.course.faults))]
        await self._fork(first, ",".join(filter(None, [*faults, self.more_faults])))
        await self._configure(dict.fromkeys(first, "initial"))

    def _fail_at(self, number: int) -> str:
        fault = self.course.faults[number]
        # What a divided optimizer loses is in copies: the test kills, once they are whole.
        kind = "sleep" if self.course.sharded and not fault.loses_nobody else fault.kind
        return ",".join(f"{rank}:{STEP + BETWEEN * number}:{fault.at}:{kind}" for rank in fault.victims)

    async def _fork(self, workers: Sequence[str], fail_at: str = "") -> None:
        await asyncio.gather(*(self.agent.fork(w, self.spec, self._environment(w, fail_at)) for w in workers))

    def _environment(self, worker: str, fail_at: str) -> Mapping[str, str]:
        name = self._node(worker)
        node = {"UNICRON_NODE": name, "UNICRON_DOMAIN": name, "UNICRON_MEMORY": str(self._memory / name / "a")}
        faults = {"UNICRON_FAIL_AT": fail_at} if fail_at else {}
        own = {BUCKET_BYTES: BUCKET, **dict(self.course.variables)}
        contract = {} if self.course.mode == NCCL else CONTRACT | {settings.MODE: self.course.mode}
        ahead = {settings.AHEAD: str(self._stands_still(worker))} if self.course.ahead else {}
        return contract | own | WRITES_AT_ONCE | (node if self.course.sharded else {}) | ahead | faults

    def _stands_still(self, worker: str) -> Path:
        """Return the file that says that a worker's device stands still."""
        return self.agent.folder / f"{worker}.stands-still"

    def _node(self, worker: str) -> str:
        """Return a worker's node: its own, but for what is left of a replica; copies there must not be lost with it."""
        victims = {f"w{rank}" for fault in self.course.faults for rank in fault.victims}
        places = [f"w{rank}" for rank in range(self.course.layout.size)]
        replica = self.course.layout.replica_of(places.index(worker)) if worker in places else -1
        broken = {self.course.layout.replica_of(places.index(victim)) for victim in victims}
        return "w0" if replica in broken and worker not in victims else worker

    async def _copied(self, step: int) -> None:
        """Wait until the members' copies of a step are whole."""
        nodes = Nodes(self.agent, self.spec, self._memory, {w: self._node(w) for w in self.members})
        await until(lambda: nodes.stored() >= step)

    async def _configure(self, members: Mapping[str, str], **options: Any) -> int:
        return await self.agent.configure(members, tensor=self.layout.tensor, pipeline=self.layout.pipeline, **options)

    def replica(self, worker: str) -> list[str]:
        """Return the members of a member's replica."""
        number = self.layout.replica_of(self.members.index(worker))
        return [w for rank, w in enumerate(self.members) if self.layout.replica_of(rank) == number]

    async def heal(self, number: int) -> None:
        """Wait for a fault; hold the others, and have them go on without the lost ones."""
        fault, step = self.course.faults[number], STEP + BETWEEN * number
        victims = [f"w{rank}" for rank in fault.victims]
        broken = {worker for victim in victims for worker in self.replica(victim)}
        await self.happens(number, victims, [worker for worker in self.members if worker not in broken])
        if self.course.ahead:
            others = [worker for worker in self.members if worker not in victims]
            waits = fault.at == "gather"
            await self.get_ahead(others if waits else [w for w in others if w in broken], step + waits)
        lost = [] if fault.loses_nobody else victims
        await self.hold([worker for worker in self.members if worker not in lost])
        await self.lose(lost)
        await self.go_on(lost, fault_step=step - 1)

    async def happens(self, number: int, victims: Sequence[str], intact: Sequence[str]) -> None:
        """Wait until the victims are lost or hang, and the whole replicas are where they need them."""
        a, fault, step = self.agent, self.course.faults[number], STEP + BETWEEN * number
        if fault.loses_nobody:
            await a.until(lambda: all(a.of(Raised, victim, a.generation) for victim in victims))
        if fault.kind in ("sleep", "communication") or self.course.sharded:
            # Clipping to a norm is a collective of the optimizer where that is divided.
            behind = "update" if self.course.sharded else "ended"
            await a.in_step(intact, step, behind if fault.at == "update" else "reduce")
        if self.course.sharded and not fault.loses_nobody:
            await self._copied(step - 1)
        if fault.kind == "kill" and self.course.sharded:
            await self.lose(victims)
        is_death = fault.kind in ("kill", "exception")
        if is_death:
            await a.until(lambda: all(victim in a.exits for victim in victims))
        self.faulted_at_s = asyncio.get_running_loop().time()
        if is_death and self.course.mode == "sockets":
            await self.noticed()

    async def get_ahead(self, workers: Sequence[str], step: int) -> None:
        """Have the hosts of workers go on while their devices wait: until they look at the losses of a step."""
        a = self.agent
        before = {worker: self._counted(worker, step) for worker in workers}
        for worker in workers:
            self._stands_still(worker).touch()
        await a.in_step(workers, step, "reduce")
        for worker in workers:
            assert self._counted(worker, step) - before[worker] >= AHEAD

    def _counted(self, worker: str, step: int) -> int:
        """Return how many micro-batches of a step a worker has reported."""
        return self.agent.phases(worker).count((step, "compute"))

    async def noticed(self) -> None:
        """Wait until a survivor's watchdog has seen that a peer is dead: detection and plan take longer than that."""
        await until(lambda: any(self._sightings(worker) > self._seen.get(worker, 0) for worker in self.members))

    def _sightings(self, worker: str) -> int:
        """Return how often the watchdog of a member has seen that a peer is dead."""
        return self.agent.output(worker).count(f"{WATCHDOG_SAW}: collective")

    async def hold(self, survivors: Sequence[str]) -> None:
        """Hold the survivors; each of them gets out of the generation, and none of them dies of it."""
        a, generation = self.agent, self.agent.generation
        lost = [worker for worker in self.members if worker not in survivors]
        a.send_all(list(survivors), Hold(generation=generation, lost=lost))
        await a.until(lambda: all(a.of(Held, w, generation) for w in survivors) or any(w in a.exits for w in survivors))
        self._check_alive(survivors)
        self._seen = {worker: self._sightings(worker) for worker in survivors}
        for worker in self.members:
            self._stands_still(worker).unlink(missing_ok=True)

    def _check_alive(self, workers: Sequence[str]) -> None:
        for worker in workers:
            assert worker not in self.agent.exits, self.agent.output(worker)

    async def lose(self, workers: Sequence[str]) -> None:
        """Have processes be gone, and their nodes with them."""
        a = self.agent
        for worker in workers:
            if worker not in a.exits:
                with suppress(ProcessLookupError):  # it may have ended, and its end not be known yet
                    a.kill(worker)
            if self._node(worker) == worker:
                shutil.rmtree(self._memory / worker, ignore_errors=True)
        await a.until(lambda: all(worker in a.exits for worker in workers))

    async def go_on(self, lost: Sequence[str], fault_step: int) -> None:
        """Bring the others into a generation without the lost ones' replicas, or with new processes in their places."""
        a = self.agent
        broken = {worker for one in lost for worker in self.replica(one)}
        if self.course.returns:
            places = {one: f"w{self._spare + i}" for i, one in enumerate(lost)}
            self._spare += len(lost)
            await self._fork(list(places.values()))
            self.members = [places.get(worker, worker) for worker in self.members]
            sources = {w: "take" if w in places.values() else "live" for w in self.members}
        else:
            await self.lose([worker for worker in broken if worker not in lost])
            self.layout = TaskLayout(
                self.layout.tensor,
                self.layout.pipeline,
                self.layout.replicas - len(broken) // (self.layout.tensor * self.layout.pipeline),
            )
            self.members = [worker for worker in self.members if worker not in broken]
            sources = dict.fromkeys(self.members, "live")
        pids = {worker: a.pids[worker] for worker, source in sources.items() if source == "live"}
        generation = await self._configure(
            sources,
            stage="boundary" if self.course.returns else "interrupted",
            complete=not (self.course.sharded and lost),
            fault_step=fault_step if self.course.sharded and lost else 0,
        )
        await self.resume(generation)
        assert {worker: a.pids[worker] for worker in pids} == pids

    async def resume(self, generation: int) -> None:
        """Wait until the members have done a step."""
        a, members = self.agent, list(self.members)
        await a.until(
            lambda: len(a.of(Resumed, generation=generation)) == len(members) or any(w in a.exits for w in members)
        )
        if len(a.of(Resumed, generation=generation)) < len(members):
            self._check_alive(members)
        resumed = a.of(Resumed, generation=generation)
        assert {message.steps_recomputed for message in resumed} == {0}


def fields_of(course: Course) -> dict[str, Any]:
    late = settings.LAG_S in dict(course.variables) and course.mode == "silent"
    behind = 0 if course.ahead else LATE_STEPS_BEHIND if late else STEPS_BEHIND
    steps = STEP + BETWEEN * len(course.faults) + behind
    model = MODEL | {"layers": course.layout.pipeline}
    # In exact mode the host looks at each micro-batch, so it is not ahead.
    sums = {"exact": False, "deterministic_sums": True} if course.ahead else {}
    return {"steps": steps, "model": model, **(SHARDED if course.sharded else sums)}


async def failure_free(a: Agent, spec_file: SpecFile, course: Course) -> Finished:
    """Train without a fault, on gloo: one replica, one pipeline stage, an optimizer that is not divided.

    Of a course whose sums are not exact, but whose every bit counts: in a layout that adds up in the same order.
    """
    fields, tensor = fields_of(course), course.layout.tensor
    pipeline = course.layout.pipeline if course.ahead else 1
    replicas = course.layout.replicas if course.ahead and course.sharded else 1
    if replicas == 1:
        fields.pop("parallel", None)
    fields["checkpoint"] = {"every": 0}
    spec = spec_file(**fields)
    size = tensor * pipeline * replicas
    if size == 1:
        return await reference_of(a, spec)
    a.messages.clear()
    workers = [f"reference{rank}" for rank in range(size)]
    await asyncio.gather(*(a.fork(worker, spec, {BUCKET_BYTES: BUCKET}) for worker in workers))
    await a.configure(dict.fromkeys(workers, "initial"), tensor=tensor, pipeline=pipeline)
    return await a.finished(size)


async def check(task: Task, spec_file: SpecFile) -> None:
    """Compare with the run without a fault."""
    a, course = task.agent, task.course
    finished = await a.finished(len(task.members))
    for worker in task.members:
        assert WAITS_FOR_WATCHDOG not in a.output(worker)
        assert OF_ONE_RANK not in a.output(worker)
        if worker in [f"w{rank}" for rank in range(course.layout.size)] and course.mode == "sockets":
            assert a.exits[worker][0] - task.faulted_at_s >= LIVES_S
    reference = await failure_free(a, spec_file, course)
    assert (finished.step, finished.samples_sha256) == (reference.step, reference.samples_sha256)
    difference = largest_difference(finished.parameters_path, reference.parameters_path)
    assert difference <= (TOLERANCE if course.sharded and not course.ahead else 0.0)


async def follow(course: Course, folder: Path, spec_file: SpecFile, memory: Path) -> None:
    async with agent(folder / "run") as a:
        task = Task(a, spec_file(**fields_of(course)), course, memory)
        await task.begin()
        for number in range(len(course.faults)):
            await task.heal(number)
        await check(task, spec_file)
