"""A task that loses every process goes on from the newest in-memory copies, its own or a peer's."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.condition import until
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from tests.unicron.test_recovery import begin, check_result
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.errors import TornSnapshot
from unicron.protocol.messages import Checkpointed, CheckpointFailed, Copies, Progress, Resumed
from unicron.snapshot import files

COPIED_AT_4 = {"every": 0, "memory_every": 4}
"""With steps this short a copy of each step may be left out because the one before is not yet stored."""


class Nodes:
    """Workers on nodes of their own failure domains, each with its part of the shared memory."""

    def __init__(self, agent_: Agent, spec: Path, memory: Path, nodes: Mapping[str, str]) -> None:
        self.agent, self.spec, self.memory, self.nodes = agent_, spec, memory, nodes

    def folder(self, node: str) -> Path:
        return self.memory / node / "a"

    async def fork(self, fail_at: str = "") -> None:
        await asyncio.gather(*(self.fork_one(worker, self.nodes[worker], fail_at) for worker in self.nodes))

    async def fork_one(self, worker: str, node: str, fail_at: str = "") -> None:
        env = {"UNICRON_NODE": node, "UNICRON_DOMAIN": node, "UNICRON_MEMORY": str(self.folder(node))} | WRITES_AT_ONCE
        await self.agent.fork(worker, self.spec, env | ({"UNICRON_FAIL_AT": fail_at} if fail_at else {}))

    async def train_to(
        self, worker: str, step: int, at: str, *, tensor: int = 1, pipeline: int = 1, then: str = ""
    ) -> None:
        """Train until a worker stops in a step, the others are in it, and all copies of the step before are stored.

        ``then`` is a fault that comes later.
        """
        fault = f"{list(self.nodes).index(worker)}:{step}:{at}:sleep"
        await self.fork(f"{fault},{then}" if then else fault)
        await self.agent.configure(dict.fromkeys(self.nodes, "initial"), tensor=tensor, pipeline=pipeline)
        await self.agent.in_step(self.nodes, step)
        await until(lambda: self.stored() >= step - 1)

    async def lose(self, worker: str, step: int, *, tensor: int = 1) -> int:
        """Train until a worker stops in a step, and kill all; return the newest step that was applied."""
        await self.train_to(worker, step, "0", tensor=tensor)
        for name in self.nodes:
            self.agent.kill(name)
        await self.agent.until(lambda: set(self.nodes) <= set(self.agent.exits))
        return max(int(m.step) for m in self.agent.of(Progress) if m.phase == "ended")

    def _copies(self) -> dict[int, list[tuple[str, files.Snapshot]]]:
        """Return the whole copies of each step with the node that holds them."""
        held: dict[int, list[tuple[str, files.Snapshot]]] = {}
        for path in self.memory.glob("*/a/*.copy"):
            with contextlib.suppress(TornSnapshot):
                copy = files.read(path)
                held.setdefault(copy.step, []).append((path.parent.parent.name, copy))
        return held

    def newest(self) -> int:
        """Return the newest step of which the nodes hold all that they hold of any step; 0: none."""
        held = {step: {p for _, copy in found for p in copy.chunks} for step, found in self._copies().items()}
        everything = set().union(*held.values())
        return max((step for step, found in held.items() if found == everything), default=0)

    def stored(self) -> int:
        """Return the newest step that every rank has copied, and that two nodes hold, if there are two; 0: none."""
        answer, alone = 0, len(set(self.nodes.values())) == 1
        for step, found in self._copies().items():
            nodes: dict[tuple[Any, ...], set[str]] = {}
            for node, copy in found:
                for piece in copy.chunks:
                    nodes.setdefault(piece, set()).add(node)
            twice = all(len(owners) > 1 for owners in nodes.values())
            if (alone or twice) and len({copy.rank for _, copy in found}) == len(self.nodes):
                answer = max(answer, step)
        return answer

    async def restore(self, fault_step: int, *, tensor: int = 1, pipeline: int = 1) -> list[Resumed]:
        """Start all workers again, as after the loss of all live state."""
        saved = self.agent.of(Checkpointed)
        await self.fork()
        return await self.agent.resumed(
            await self.agent.configure(
                dict.fromkeys(self.nodes, "checkpoint" if saved else "initial"),
                checkpoint=saved[-1].path if saved else "",
                fault_step=fault_step,
                tensor=tensor,
                pipeline=pipeline,
            )
        )


@pytest.mark.slow
async def test_all_ranks_lost_the_newest_copies_are_nearer_than_the_checkpoint(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    spec = spec_file(checkpoint={"every": 2, "memory_every": 3})
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n0", "w2": "n1"})
        applied = await nodes.lose("w0", 4)
        newest = nodes.newest()
        assert (newest, [m.step for m in a.of(Checkpointed)]) == (3, [2])
        resumed = await nodes.restore(applied)
        assert {(r.step, r.steps_recomputed) for r in resumed} == {(newest + 1, applied - newest)}
        assert {r.source for r in resumed} <= {"memory", "peer-memory"}
        await check_result(a, spec, await a.finished(3))


async def test_a_lost_nodes_part_comes_from_its_peer(tmp_path: Path, spec_file: SpecFile, shared_memory: Path) -> None:
    spec = spec_file(checkpoint=COPIED_AT_4)
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1", "w2": "n2"})
        applied = await nodes.lose("w1", 5)
        shutil.rmtree(nodes.folder("n1"))
        newest = nodes.newest()
        resumed = await nodes.restore(applied)
        assert {(r.step, r.steps_recomputed) for r in resumed} == {(newest + 1, applied - newest)}
        assert "peer-memory" in {r.source for r in resumed}
        await check_result(a, spec, await a.finished(3))


@pytest.mark.parametrize("damage", ["torn", pytest.param("flipped", marks=pytest.mark.slow)])
async def test_a_damaged_copy_is_never_used(
    damage: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """One node holds the only copies: without one of its ranks' newest, the state before it is taken, or none."""
    spec = spec_file(checkpoint=COPIED_AT_4)
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n0"})
        newest = await nodes.lose("w1", 5)
        for path in nodes.folder("n0").glob("1-1-*.copy"):
            content = bytearray(path.read_bytes())
            at = 8 if damage == "torn" else len(content) // 2  # the header's mark, or a value
            content[at] ^= 1
            path.write_bytes(content)
        resumed = await nodes.restore(newest)
        assert {(r.source, r.step, r.steps_recomputed) for r in resumed} == {("initial", 1, newest)}
        assert "snapshot not used" in a.output("w0")
        await check_result(a, spec, await a.finished(2))


@pytest.mark.slow
async def test_a_task_that_begins_anew_does_not_use_what_another_left(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    spec = spec_file(checkpoint=COPIED_AT_4)
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        await nodes.lose("w1", 5)
        resumed = await nodes.restore(0)
        assert {(r.source, r.step) for r in resumed} == {("initial", 1)}
        await check_result(a, spec, await a.finished(2))


@pytest.mark.slow
async def test_copies_of_one_layout_are_taken_in_another(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """A tensor-parallel pair's copies, one node's lost, are put together for two replicas of the whole model."""
    spec = spec_file(checkpoint=COPIED_AT_4)
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        applied = await nodes.lose("w1", 5, tensor=2)
        shutil.rmtree(nodes.folder("n0"))
        newest = nodes.newest()
        resumed = await nodes.restore(applied)
        assert {(r.step, r.steps_recomputed) for r in resumed} == {(newest + 1, applied - newest)}
        assert {m.source for m in resumed} == {"memory", "peer-memory"}
        finished = await a.finished(2)
        a.messages.clear()
        await begin(a, spec, ["reference"])
        reference = await a.finished(1)
        assert finished.samples_sha256 == reference.samples_sha256
        # Tensor parallelism adds in another order, and Adam turns the rounding of near-zero gradients into steps.
        assert finished.loss == pytest.approx(reference.loss, abs=1e-5)


@pytest.mark.slow
async def test_a_node_without_room_for_copies_says_so_and_trains_on(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """Each rank that has no room reports it, once in a generation; nobody else does."""
    spec = spec_file(steps=12, checkpoint={"every": 0, "memory_every": 1})
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        nodes.folder("n1").parent.mkdir(parents=True)
        nodes.folder("n1").touch()  # no folder can be made
        await nodes.fork()
        await a.configure(dict.fromkeys(nodes.nodes, "initial"))
        finished = await a.finished(2)
        [lacks] = a.of(Copies)
        assert (lacks.rank, lacks.generation) == (1, 1)
        assert lacks.lack.startswith("no more in-memory copies in this generation: FileExistsError")
        assert not a.of(CheckpointFailed)
        await check_result(a, spec, finished)


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["files", "folder"])
async def test_copies_that_are_gone_are_reported_and_made_anew_at_once(
    gone: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """A cleaner removes them while nothing fails: the next copies would be due a hundred steps later."""
    every = 100
    checkpoint, parallel = {"every": 0, "memory_every": every}, {"distributed_optimizer": gone == "folder"}
    spec = spec_file(steps=20_000, exact=False, checkpoint=checkpoint, parallel=parallel)
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        await nodes.fork()
        await a.configure(dict.fromkeys(nodes.nodes, "initial"))
        folder = nodes.folder("n0")

        await a.until(lambda: bool(a.of(Copies)))
        assert nodes.stored() >= every
        before = {path.name.split("-")[1] for path in folder.iterdir()}
        if gone == "folder":
            shutil.rmtree(folder)
        else:
            for path in folder.iterdir():
                path.unlink()
        await a.until(lambda: any(m.lack for m in a.of(Copies)))
        if gone == "folder":
            folder.mkdir(mode=0o700)  # as the node's agent does
        await until(lambda: nodes.stored() % every != 0)
        assert {path.name.split("-")[1] for path in folder.iterdir()} == before, "of the ranks whose parts were there"
        await a.until(lambda: len(a.of(Copies)) == 3)
        first, lacks, again = a.of(Copies)
        assert (lacks.rank, lacks.lack) == (
            0,
            f"in-memory copies are gone from {folder}: something else has removed or changed them",
        )
        assert [(m.rank, m.lack) for m in (first, again)] == [(0, ""), (0, "")]
        assert first.step <= lacks.step <= again.step
        assert not a.of(CheckpointFailed)
