"""One rank of an export of a model that is divided: its shards lie on several ranks, in both ways of cutting.

    python -m tests.unicron.exporting RANK WORLD_SIZE FOLDER LAYERS WIDTH PORTION_BYTES FILE_BYTES UNSEEING

Every number of the model says where in which tensor it is. The last ``UNSEEING`` ranks do not see the folder of the
result. What the rank has used of memory at most, beside what it had, goes to FOLDER/memory-RANK, and
why the result could not be written to FOLDER/reason-RANK.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.checkpoint import export, storage


def whole(layer: int, width: int) -> torch.Tensor:
    """Return a layer's weight."""
    return (torch.arange(width * width, dtype=torch.float32) + layer).reshape(width, width)


class Shards(torch.nn.Module):
    """One rank's part: of even layers rows, of odd ones columns, and a vector that all ranks have."""

    def __init__(self, rank: int, size: int, layers: int, width: int) -> None:
        """Make the part."""
        super().__init__()
        self.rank, self.size, self.width = rank, size, width
        part = slice(rank * width // size, (rank + 1) * width // size)
        self.weights = torch.nn.ParameterList(
            whole(n, width)[part].clone() if n % 2 == 0 else whole(n, width)[:, part].clone() for n in range(layers)
        )
        self.norm = torch.nn.Parameter(torch.arange(width).to(torch.bfloat16))

    def sharded_state_dict(self, metadata: Any) -> dict[str, Any]:
        """Return Megatron's description of the part."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        found = {
            str(n): ShardedTensor.from_rank_offsets(f"layers.{n}", weight, (n % 2, self.rank, self.size))
            for n, weight in enumerate(self.weights)
        }
        return found | {"norm": ShardedTensor.from_rank_offsets("norm", self.norm, replica_id=(0, 0, self.rank))}


def used_kb(name: str) -> int:
    """Return a figure of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def main(rank: int, size: int, folder: Path, layers: int, width: int, portion: int, file: int, unseeing: int) -> None:
    """Be the rank."""
    export.PORTION_BYTES, export.FILE_BYTES = portion, file
    if rank >= size - unseeing:
        storage.read = lambda location: b""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    model = torch.nn.Module()
    model.module = Shards(rank, size, layers, width)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_kb = used_kb("VmRSS")
    with ThreadPoolExecutor(1) as thread:
        exported = export.export(model, folder / "result", thread, beside={"summary.json": b"{}"})
    (folder / f"memory-{rank}").write_text(str((used_kb("VmHWM") - before_kb) << 10))
    (folder / f"reason-{rank}").write_text(exported.reason)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *(int(number) for number in sys.argv[4:]))
