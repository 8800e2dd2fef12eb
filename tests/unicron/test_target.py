"""The proof that the nodes of a generation see one place for checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from unicron.checkpoint import target


@pytest.mark.parametrize(
    ("members", "new"),
    [
        ([("n0/0", "initial"), ("n0/1", "initial")], False),  # one node
        ([("n0/0", "initial"), ("n1/0", "initial")], True),
        ([("n0/0", "live"), ("n1/0", "live")], False),
        ([("n0/0", "live"), ("n1/0", "live"), ("n1/1", "take")], False),
        ([("n0/0", "live"), ("n1/0", "take")], True),
        ([("n0/0", "checkpoint"), ("n1/0", "checkpoint")], True),
    ],
)
def test_what_is_known_is_not_proven_again(members: list[tuple[str, str]], new: bool) -> None:
    assert target.is_new([[rank, *member] for rank, member in enumerate(members)]) is new


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (tmp_path / "place").mkdir()
        assert target.prove(f"{tmp_path}/place", 3, ["n0"], lambda work: work.wait()) == ""
        assert list((tmp_path / "place").iterdir()) == []  # the token is gone
        reason = target.prove(f"{tmp_path}/file", 3, ["n0"], lambda work: work.wait())
        assert reason.startswith(f"n0 cannot write checkpoints to {tmp_path}/file: ")
    finally:
        dist.destroy_process_group()
