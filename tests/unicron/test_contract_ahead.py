"""The contract backend where the host is ahead of the device: garbage until an abort ends what is stuck."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unicron.contract import settings, stream
from tests.unicron.contract.ranks import Rank, run
from tests.unicron.test_contract import ENDED, SILENT, everyone

pytestmark = pytest.mark.timeout(60)


def stand_still(*, stands: bool = True) -> None:
    """Have this process's device stand still, or not any more."""
    file = Path(os.environ[settings.AHEAD])
    if stands:
        file.touch()
    else:
        file.unlink()


def gets_ahead(rank: Rank) -> None:
    """A peer does not come. The host goes on with garbage, and nothing behind it is reached before the abort."""
    rank.backend.connect(everyone())
    if rank.number == 1:
        rank.signals.wait(["done"])
        return
    before = rank.backend.mark()
    stand_still()
    values, later, sent = torch.ones(2), torch.ones(1), torch.ones(1)
    dist.all_reduce(values)
    dist.all_reduce(later)
    dist.send(sent, 1)
    later.fill_(2.0)
    assert values.isnan().all()
    mark = rank.backend.mark()
    looks, synchronize = threading.Event(), stream.synchronize

    def announce() -> None:
        looks.set()
        synchronize()

    def end() -> None:
        looks.wait()
        assert before.is_reached()
        assert not mark.is_reached()
        rank.backend.abort([everyone()])

    replaced: Any = stream
    replaced.synchronize = announce
    ending = threading.Thread(target=end)
    ending.start()
    match os.environ["LOOK"]:
        case "tolist":
            values.tolist()
        case "float":
            float(sent)
        case "synchronize_stream":
            rank.backend.synchronize_stream()
    assert mark.is_reached(), "who looks at the device waits for the abort"
    ending.join()
    assert values.isnan().all()
    assert later.item() == 2.0, "what the host has written behind a collective stays"
    rank.signals.set("done", "1")


@pytest.mark.parametrize("look", ["tolist", "float", "synchronize_stream"])
def test_the_host_may_go_on_without_what_never_comes(look: str, tmp_path: Path) -> None:
    variables = SILENT | {settings.AHEAD: str(tmp_path / "stands-still"), "LOOK": look}
    assert run(gets_ahead, 2, tmp_path, variables) == [ENDED] * 2


def issues_behind_what_never_comes(rank: Rank) -> None:
    """What is issued on the stream afterwards, in another group, begins behind the abort."""
    stuck, other, alone = dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([0])
    for group in (stuck, other):
        dist.barrier(group)
    values = torch.ones(1)
    if rank.number == 1:
        rank.signals.wait(["issued"])
        work: Any = dist.all_reduce(values, group=other, async_op=True)
        ended = threading.Thread(target=work.wait)
        ended.start()
        ended.join(0.3)
        assert ended.is_alive()
        rank.signals.set("seen", "1")
        ended.join()
        return
    stand_still()
    dist.all_reduce(values, group=alone)
    assert values.item() == 1.0, "one rank waits for nobody"
    dist.all_reduce(torch.ones(1), group=stuck)
    both: list[Any] = [
        dist.all_reduce(values, group=other, async_op=True),
        dist.all_reduce(torch.ones(1), group=alone, async_op=True),
    ]
    stand_still(stands=False)
    rank.signals.set("issued", "1")
    rank.signals.wait(["seen"])
    assert not any(work.is_completed() for work in both)
    rank.backend.abort([stuck])
    for work in both:
        work.wait()
    assert values.item() == 2.0


def test_what_comes_behind_it_waits_for_the_abort(tmp_path: Path) -> None:
    variables = SILENT | {settings.AHEAD: str(tmp_path / "stands-still")}
    assert run(issues_behind_what_never_comes, 2, tmp_path, variables) == [ENDED] * 2
