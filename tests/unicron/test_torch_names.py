"""Names that differ between torch's versions: what the library uses works on the installed one, by either name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unicron import torch_names
from unicron.join import groups

ROOT = Path(__file__).resolve().parents[2]
NEW_NAMES = ("reduce_scatter_single", "all_gather_single")
"""Of torch 2.13."""
RANK = """
import json, sys
import torch
import torch.distributed as dist

store, rank, *hidden = sys.argv[1:]
for name in hidden:
    delattr(dist, name)
from unicron import torch_names

dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
part, whole = torch.empty(2), torch.empty(4)
own = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (int(rank) + 1)
torch_names.reduce_scatter_single(part, own, group=dist.group.WORLD, async_op=True).wait()
torch_names.all_gather_single(whole, part, group=dist.group.WORLD, async_op=True).wait()
record = torch._C._distributed_c10d._dump_fr_trace_json(True, False)
print(json.dumps([part.tolist(), whole.tolist(), len(json.loads(record).get("entries", []))]))
dist.destroy_process_group()
"""


def outputs(store: Path, hidden: list[str], options: list[str], environment: dict[str, str]) -> list[list[object]]:
    """Run two ranks to which torch lacks some names; return what each has printed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", *options, "-c", RANK, store, str(rank), *hidden],
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]  # gloo of torch 2.9 prints, too


@pytest.mark.slow
def test_collectives_by_the_name_that_this_torch_has_for_them_and_nothing_warns(tmp_path: Path) -> None:
    recorder = dict([torch_names.FLIGHT_RECORDER_ENTRIES])
    options = ["-W", "error::FutureWarning"]
    first, second = outputs(tmp_path / "store", [], options, recorder)
    assert first[:2] == [[3.0, 6.0], [3.0, 6.0, 9.0, 12.0]]
    assert second[:2] == [[9.0, 12.0], [3.0, 6.0, 9.0, 12.0]]
    assert first[2] == second[2] != 0  # the flight recorder has them, which it does not by itself before torch 2.11


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.distributed, NEW_NAMES[0]), reason="this torch has the former names alone")
def test_collectives_by_their_former_names(tmp_path: Path) -> None:
    first, second = outputs(tmp_path / "store", list(NEW_NAMES), [], {})
    assert first[:2] == [[3.0, 6.0], [3.0, 6.0, 9.0, 12.0]]
    assert second[:2] == [[9.0, 12.0], [3.0, 6.0, 9.0, 12.0]]


def test_collectives_are_recorded_unless_the_operator_has_set_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = torch_names.FLIGHT_RECORDER_ENTRIES
    monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as inner:
        inner.setattr(os, "environ", dict(os.environ))
        groups._set_backend_environment("10.0.0.1")
        assert os.environ[name] == value
        os.environ[name] = "0"
        groups._set_backend_environment("10.0.0.1")
        assert os.environ[name] == "0"
