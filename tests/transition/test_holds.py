"""What the command to hold tells a node of the workers that are lost: what its own ranks need, whatever the cluster."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from services.transition.state import node_of
from shared.events.plans import Layout, Stage
from shared.messages.commands import COMMANDS, HoldTask
from tests.transition.drive import Drive, change, stage
from unicron.link.sparing import Sparing


def formed(generation: int, workers: list[str], **shape: int) -> Stage:
    """A stage of that many replicas as there is room for."""
    sizes = {"tensor": 1, "pipeline": 1, **shape}
    data = len(workers) // (sizes["tensor"] * sizes["pipeline"])
    layout = Layout(**sizes, data=data, micro_batch=1)
    return stage(generation, workers).model_copy(update={"layout": layout})


def training(workers: list[str], **shape: int) -> Drive:
    """A task whose first stage has formed with these workers."""
    d = Drive(nodes=sorted({node_of(worker) for worker in workers}))
    d.plan("p1", change(prepare=workers, target=formed(1, workers, **shape), from_generation=0))
    d.answer_all()
    assert d.phases() == ["prepared", "restored"]
    return d


def hold(d: Drive, workers: list[str], lost: list[str], **rest: Any) -> dict[str, HoldTask]:
    """Have a plan hold all but the lost workers; return what each node gets."""
    survivors = [worker for worker in workers if worker not in set(lost)]
    d.plan("p2", change(action="none", survivors=survivors, failed=lost, hold=True, **rest))
    found = {send.node: send.command for send in d.open("hold")}
    assert all(isinstance(command, HoldTask) for command in found.values())
    return found  # type: ignore[return-value]


def spares(members: list[str], layout: Layout, rank: int, lost: list[str]) -> bool:
    """Whether a rank that computes goes on in its replica."""
    sparing = Sparing()
    sparing.join(members)
    replica = rank // layout.tensor % layout.data
    sparing.set_replica([r for r in range(len(members)) if r // layout.tensor % layout.data == replica])
    sparing.begin_passes(0.0)
    sparing.hold(lost, 0.0)
    return sparing.spares(0.0)


def test_a_node_is_told_few_lost_workers_however_many_there_are() -> None:
    workers = [f"n{node:04d}/{slot}" for node in range(2000) for slot in range(8)]
    lost = [worker for worker in workers if int(worker[1:5]) % 10 == 3]
    commands = hold(training(workers, tensor=4, pipeline=4), workers, lost)
    assert len(commands) == 1800
    assert max(len(COMMANDS.request.encode(command)) for command in commands.values()) <= 2000


@given(st.data(), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.integers(2, 4), st.integers(1, 3))
def test_each_rank_decides_as_if_it_knew_all_who_are_lost(
    data: st.DataObject, shape: tuple[int, int], replicas: int, slots: int
) -> None:
    tensor, pipeline = shape
    number = tensor * pipeline * replicas
    workers = data.draw(st.permutations([f"n{i // slots}/{i % slots}" for i in range(number)]))
    lost = sorted(data.draw(st.sets(st.sampled_from(workers), min_size=1, max_size=number - 1)))
    d = training(workers, tensor=tensor, pipeline=pipeline)
    begun = formed(1, workers, tensor=tensor, pipeline=pipeline)
    if data.draw(st.booleans()):
        # A plan that is superseded may have had the ranks enter its stage, in which replicas are others.
        begun = formed(2, data.draw(st.permutations(workers)), tensor=tensor, pipeline=pipeline)
        d.plan("p", change(survivors=workers, hold=True, target=begun))
        for send in d.open("hold") + d.open("open-store"):
            d.reply(send)
        assume(d.open("open-store"))
        d.reply(d.one("open-store"))
        assert d.open("configure")
    commands = hold(d, workers, lost)
    members = [member.worker for member in begun.members]
    for rank, worker in enumerate(members):
        if worker not in lost:
            named = commands[node_of(worker)].lost
            assert set(named) <= set(lost)
            assert spares(members, begun.layout, rank, named) == spares(members, begun.layout, rank, lost)
