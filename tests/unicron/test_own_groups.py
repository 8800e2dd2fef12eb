"""The groups that each rank makes by itself, beside those of stock Megatron, with a backend that connects nothing."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from unicron.megatron import own_groups, two_stages
from unicron.megatron.group_references import groups_by_role

pytestmark = pytest.mark.usefixtures("megatron")

WORLD = 16
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 4)]
TIMEOUT = timedelta(minutes=1)


@contextmanager
def world_of(rank: int, size: int = WORLD) -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=cast(Any, FakeStore()), rank=rank, world_size=size)
    try:
        yield
    finally:
        two_stages.drop()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0


def form(tensor: int, pipeline: int, *, share: bool) -> None:
    from megatron.core import parallel_state

    with own_groups.only_own(share=share):
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        own_groups.make_group_of_all(TIMEOUT)
        two_stages.make(TIMEOUT)


def ranks_by_role() -> dict[str, list[int]]:
    return {role: dist.get_process_group_ranks(group) for role, group in groups_by_role().items()}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_megatrons_groups_under_names_that_its_peers_give_them(
    layout: tuple[int, int], share: bool
) -> None:
    from megatron.core import parallel_state

    names: dict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    ranks_by_name: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    next_names = set()
    for rank in range(WORLD):
        with world_of(rank):
            parallel_state.initialize_model_parallel(*layout, create_gloo_process_groups=False)
            stock = ranks_by_role()
        with world_of(rank):
            form(*layout, share=share)
            assert ranks_by_role() == stock
            found = {**groups_by_role(), "second": two_stages.second_group()}
            for role, group in found.items():
                if group is not None:
                    ranks = tuple(dist.get_process_group_ranks(group))
                    names[role, ranks].add(group.group_name)
                    ranks_by_name[group.group_name].add(ranks)
            next_names.add(dist.distributed_c10d._world.group_count)
    assert {len(given) for given in names.values()} == {1}
    assert {len(of_name) for of_name in ranks_by_name.values()} == {1}
    # A script's own groups get their names from here on.
    (next_name,) = next_names
    assert all(int(name) < next_name for name in ranks_by_name)


@pytest.mark.parametrize("share", [True, False])
def test_the_calls_of_a_rank_do_not_depend_on_the_number_of_ranks(share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    new_group = Mock(wraps=dist.new_group)
    monkeypatch.setattr(dist, "new_group", new_group)
    calls = []
    for size in (16, 256):
        new_group.reset_mock()
        with world_of(size // 2, size):
            form(2, 2, share=share)
        calls.append(new_group.call_count)
    assert calls[0] == calls[1] <= (8 if share else 20)


def test_torchs_barrier_behind_each_group_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with world_of(0):
        monkeypatch.setenv(own_groups.INIT_BARRIER, "1")
        form(2, 1, share=False)
    assert os.environ[own_groups.INIT_BARRIER] == "1"
