"""What the reply of one node costs: the same, however many others are still to reply."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.transition.decide import decide
from services.transition.evolve import evolve
from services.transition.state import Replied, node_of
from tests.counted_work import instructions, peak_bytes
from tests.transition.drive import Drive, answer, change, stage

SLOTS = 2


def recovering(nodes: int, kind: str) -> Drive:
    """A part whose commands of one kind are out, two of them answered."""
    workers = [f"n{node}/{slot}" for node in range(nodes) for slot in range(SLOTS)]
    d = Drive(nodes=sorted({node_of(worker) for worker in workers}))
    target = stage(1, workers)
    if kind != "prepare":
        d.plan("p1", change(prepare=workers, target=target, from_generation=0))
        d.answer_all()
    match kind:
        case "prepare":
            d.plan("p2", change(prepare=workers, target=target))
        case "hold":
            interrupted = stage(2, workers, interrupted=True)
            d.plan("p2", change(action="none", survivors=workers, hold=True, interrupted=interrupted))
        case "drain" | "configure":
            d.plan("p2", change(survivors=workers, target=stage(2, workers)))
        case _:
            d.plan("p2", change(action="end", release=workers))
    while len(d.open(kind)) != nodes:
        d.reply(d.open()[0])
    for send in d.open(kind)[:2]:
        d.reply(send)
    return d


@pytest.mark.parametrize("kind", ["prepare", "hold", "drain", "configure", "release"])
@pytest.mark.parametrize("measure", [instructions, peak_bytes])
def test_a_reply_costs_the_same_however_many_nodes_are_to_reply(
    kind: str, measure: Callable[[Callable[[], object]], int]
) -> None:
    def cost(nodes: int) -> int:
        d = recovering(nodes, kind)
        send = d.open(kind)[3]
        reply = Replied(send.command.command_id, answer(send), d.at)
        return measure(lambda: decide(d.state, reply, d.at))

    assert cost(240) <= 1.2 * cost(40)


@pytest.mark.parametrize("measure", [instructions, peak_bytes])
def test_a_lost_node_costs_the_same_however_many_there_are(measure: Callable[[Callable[[], object]], int]) -> None:
    def cost(nodes: int) -> int:
        workers = [f"n{node}/{slot}" for node in range(nodes) for slot in range(SLOTS)]
        d = Drive(nodes=sorted({node_of(worker) for worker in workers}))
        d.plan("p1", change(prepare=workers, target=stage(1, workers), from_generation=0))
        d.answer_all()
        lost = d.lost("n3")
        assert "n3/0" in d.state.task("a").occupied
        found = measure(lambda: evolve(d.state, lost, d.at))
        assert "n3/0" not in d.state.task("a").occupied
        return found

    assert cost(240) <= 1.2 * cost(40)
