"""The export of a task's result (``unicron.checkpoint.export``)."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from shared.messages.node_files import ReadResult
from shared.messages.task_folders import TaskFolders
from tests.unicron import exporting
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from tests.unicron.test_loss_scale import example
from tests.unicron.zygote import zygote
from unicron.checkpoint import export
from unicron.state.chunks import undivided

pytestmark = pytest.mark.timeout(180)

GATED = (
    "persist_layer_norm=False,",
    "persist_layer_norm=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,",
)

HIDDEN, WIDTH = 64, 256
"""Of the example."""


@pytest.mark.slow
async def test_a_gated_model_is_exported_whole(tmp_path: Path, spec_file: SpecFile) -> None:
    """The first weight of a gated MLP is two shards of one global tensor on each rank."""
    found = []
    spec = spec_file(script=str(example(tmp_path, GATED)), steps=3, batch={"global": 16, "micro": 2})
    async with agent(tmp_path / "run") as a:
        for workers in (["one"], ["two", "three"]):
            a.messages.clear()
            await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
            await a.configure(dict.fromkeys(workers, "initial"), tensor=len(workers))
            found.append(load_file((await a.finished(len(workers))).parameters_path))
    whole, split = found
    assert whole["decoder.layers.0.mlp.linear_fc1.weight"].shape == (2 * WIDTH, HIDDEN)
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        assert torch.allclose(value, split[name], atol=1e-5), name


def exported(
    folder: Path, *, ranks: int, layers: int, width: int, portion: int, file: int, unseeing: int = 0, reason: str = ""
) -> Path:
    """Export a divided model (``tests.unicron.exporting``); return the folder of the result.

    ``reason``: why it cannot be written, as all ranks know.
    """
    numbers = [str(number) for number in (layers, width, portion, file, unseeing)]

    def run(rank: int) -> None:
        (place := folder / f"rank{rank}").mkdir()
        zygote().run(["-m", "tests.unicron.exporting", str(rank), str(ranks), str(folder), *numbers], place)

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(run, range(ranks)))
    reasons = [(folder / f"reason-{rank}").read_text() for rank in range(ranks)]
    assert len(set(reasons)) == 1
    assert reasons[0].startswith(reason) if reason else not reasons[0]
    return folder / "result"


@pytest.mark.slow
def test_no_rank_gathers_the_model(tmp_path: Path) -> None:
    """Each collects one portion at a time of its own files, whose numbers are those of all ranks' shards."""
    ranks, layers, width, portion = 3, 32, 1536, 12 << 20
    tensor_bytes = 4 * width * width
    result = exported(tmp_path, ranks=ranks, layers=layers, width=width, portion=portion, file=5 * tensor_bytes)
    index = json.loads((result / export.INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"parameters-{n:05d}-of-00007.safetensors" for n in range(1, 8)]
    assert sorted(p.name for p in result.iterdir()) == sorted([*names, export.INDEX, "summary.json"])
    assert index["metadata"]["total_size"] == layers * tensor_bytes + 2 * width
    found = {name: value for file in names for name, value in load_file(result / file).items()}
    assert found.keys() == index["weight_map"].keys() == {"norm", *(f"layers.{n}" for n in range(layers))}
    for n in range(layers):
        assert torch.equal(found[f"layers.{n}"], exporting.whole(n, width))
    assert torch.equal(found["norm"], torch.arange(width).to(torch.bfloat16))
    most = max(int((tmp_path / f"memory-{rank}").read_text()) for rank in range(ranks))
    # A portion, a round of a transfer twice, and what the allocator keeps; the model has 302 MB.
    assert most < layers * tensor_bytes / 3


def test_ranks_that_do_not_see_the_place_write_nothing(tmp_path: Path) -> None:
    """And what is small is one file, without an index."""
    result = exported(tmp_path, ranks=2, layers=4, width=8, portion=300, file=600, unseeing=1)
    files = sorted(set(json.loads((result / export.INDEX).read_text())["weight_map"].values()))
    assert len(files) == 2
    found = {name: value for file in files for name, value in load_file(result / file).items()}
    assert all(torch.equal(found[f"layers.{n}"], exporting.whole(n, 8)) for n in range(4))
    (one := tmp_path / "one").mkdir()
    result = exported(one, ranks=2, layers=4, width=8, portion=300, file=1 << 20)
    assert {p.name for p in result.iterdir()} == {"parameters.safetensors", "summary.json"}
    assert load_file(result / "parameters.safetensors").keys() == found.keys()


def test_several_files_are_fetched_as_one(tmp_path: Path) -> None:
    """As agents serve a result: its tensors lie as they are, behind one header."""
    (folder := tmp_path / "tasks" / "gpt" / "generation-1").mkdir(parents=True)
    exported(folder, ranks=2, layers=4, width=8, portion=300, file=600)
    _, content = TaskFolders(tmp_path).answer(ReadResult(task="gpt", generation=1, offset=0))
    found = load(content)
    assert found.keys() == {"norm", *(f"layers.{n}" for n in range(4))}
    assert all(torch.equal(found[f"layers.{n}"], exporting.whole(n, 8)) for n in range(4))


def test_what_one_rank_cannot_write_leaves_nothing_on_any(tmp_path: Path) -> None:
    """And the next try writes all of it."""
    export_again = partial(exported, ranks=2, layers=4, width=8, portion=300, file=600)
    blocked = tmp_path / "result" / "parameters-00002-of-00002.safetensors.partial"
    blocked.mkdir(parents=True)
    result = export_again(tmp_path, reason="IsADirectoryError: ")
    assert list(result.iterdir()) == [blocked]
    blocked.rmdir()
    (again := tmp_path / "again").mkdir()
    result.rename(again / "result")
    assert (export_again(again) / export.INDEX).exists()


def test_files_are_dealt_to_the_ranks_that_write() -> None:
    tensors = [undivided(name, (size,), "float32") for name, size in (("a", 3), ("b", 1), ("c", 9), ("d", 2))]
    files = export.plan_files([undivided("z", (2,), "bfloat16"), *tensors], [0, 4], limit_bytes=16)
    assert [(file.rank, [one.key for one in file.tensors]) for file in files] == [
        (0, ["a", "b"]),
        (4, ["c"]),
        (0, ["d", "z"]),
    ]
    assert [file.name for file in export.plan_files(tensors, [0, 4], limit_bytes=60)] == ["parameters.safetensors"]
    assert [file.tensors for file in export.plan_files([], [0], limit_bytes=60)] == [[]]


async def test_a_result_can_be_read_like_any_file_of_the_process(tmp_path: Path, spec_file: SpecFile) -> None:
    """Where tasks have users of their own, the agent that serves it is another user."""
    spec = spec_file(steps=1)
    async with agent(tmp_path / "run") as a:
        await a.fork("one", spec)
        await a.configure({"one": "initial"})
        result = Path((await a.finished(1)).parameters_path)
    (other := tmp_path / "other").touch()
    assert mode_of(result) == mode_of(other)


def mode_of(path: Path) -> int:
    return path.stat().st_mode
