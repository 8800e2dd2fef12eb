"""The common part of all systems' training scripts: the job, the injected fault, and the notes that times come from.

Every script computes the same updates with the same model code: micro-batch k of step s is the same samples, gradients
are summed over the ranks and scaled by 1/M once. The systems differ in what follows a failure.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.megatron import cpu
from unicron.process.faults import ScheduledFault
from unicron.trainer import model
from unicron.trainer.data import Samples
from unicron.trainer.dropout import Dropout
from unicron.trainer.passes import forward_backward
from unicron.trainer.spec import Spec, load

FOLDER_VARIABLE = "RECOVERY_FOLDER"
"""Environment variable: folder of one run, with ``spec.json``; notes, checkpoints and the result go there."""

FAULT_VARIABLE = "RECOVERY_FAULT"
"""Environment variable: ``rank:step:kind``, the fault of the run; empty: none."""

DATA_VARIABLE = "RECOVERY_DATA"
"""Environment variable: where the tokenised corpus is kept, the same for all runs."""

COLLECTIVE_TIMEOUT = timedelta(seconds=10)
"""For the peers' collectives. The defaults are 30 minutes (torch) and 1 minute (torchft). Ten seconds favour the peers:
with a large model such a time-out would raise false alarms."""

FAULT_AT = "1"
"""The fault comes before this micro-batch (from 0) of the rank: in mid-step, with work that can be lost."""

BEFORE_REDUCTION = "reduce"
"""Place of a fault of kind ``absent``: all ranks but one enter the collective."""


class Job:
    """One process's view of the job."""

    def __init__(self) -> None:
        """Read the environment and open the data."""
        self.folder = Path(os.environ[FOLDER_VARIABLE])
        self.spec: Spec = load(self.folder / "spec.json")
        self.samples = Samples(self.spec, Path(os.environ[DATA_VARIABLE]))
        self._notes = os.open(self.folder / "notes.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        rank, step, kind = (os.environ.get(FAULT_VARIABLE) or "-1:-1:none").split(":")
        at, kind = (BEFORE_REDUCTION, "sleep") if kind == "absent" else (FAULT_AT, kind)
        self._fault = ScheduledFault(rank=int(rank), step=int(step), at=at, kind=kind, always=False)
        torch.set_num_threads(1)

    def note(self, what: str, *, rank: int, step: int, ranks: int) -> None:
        """Write a line: ``done`` after an update, ``ready`` before the first, ``fault``. ``ranks``: their number."""
        line = {"at": time.time(), "what": what, "pid": os.getpid(), "rank": rank, "step": step, "ranks": ranks}
        os.write(self._notes, json.dumps(line).encode() + b"\n")

    def noted(self, what: str) -> list[dict[str, Any]]:
        """Return the notes of all processes of this kind."""
        lines = (self.folder / "notes.jsonl").read_text().splitlines()
        return [note for note in map(json.loads, lines) if note["what"] == what]

    def fault(self, rank: int, step: int, at: str, ranks: int) -> None:
        """Fail, once in a run, if this is the rank, the step and the place (as in ``unicron.process.faults``).

        Raises:
            InjectedFault: for kind ``exception``.
        """
        if (rank, step, at) != (self._fault.rank, self._fault.step, self._fault.at):
            return
        try:
            os.close(os.open(self.folder / "fault", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.note("fault", rank=rank, step=step, ranks=ranks)
        self._fault.reached(step, at)

    def own(self, rank: int, ranks: int) -> list[int]:
        """Return a rank's micro-batches in a run without failures."""
        return list(range(rank, self.spec.micro_batches, ranks))

    def save(self, trained: Any) -> None:
        """Write the parameters as the run's result."""
        from safetensors.torch import save_file

        tensors = {k: v.contiguous().clone() for k, v in trained.module.state_dict().items() if torch.is_tensor(v)}
        save_file(tensors, self.folder / "partial.safetensors")
        os.replace(self.folder / "partial.safetensors", self.folder / "parameters.safetensors")


class PlainGpt:
    """The GPT of the job, data parallel without any protection: for the peers' scripts."""

    def __init__(self, job: Job) -> None:
        """Build and initialise it; the default process group must exist."""
        from megatron.core import parallel_state

        minutes = COLLECTIVE_TIMEOUT.total_seconds() / 60
        parallel_state.initialize_model_parallel(
            1, 1, distributed_timeout_minutes=minutes, create_gloo_process_groups=False
        )
        self._job = job
        self.model, self.optimizer = model.build(job.spec, 1, 1)
        model.initialise(job.spec, self.model)
        self._dropout = Dropout(job.spec, self.model)
        [self._buffer] = self.model.buffers

    @property
    def gradients(self) -> torch.Tensor:
        """All gradients, flat."""
        gradients: torch.Tensor = self._buffer.grad_data
        return gradients

    def compute(self, rank: int, step: int, mine: list[int], ranks: int) -> None:
        """Leave the gradients of a rank's micro-batches in ``gradients``, scaled by 1/M."""
        job = self._job
        self.gradients.zero_()
        for parameter in self.model.parameters():
            parameter.grad = None
        for index, k in enumerate(mine):
            job.fault(rank, step, str(index), ranks)
            batch = job.samples.batch(job.samples.ids(step, k))
            forward_backward(job.spec, self.model, self._dropout, step, [(k, batch)], lambda k, loss: None)
        job.fault(rank, step, BEFORE_REDUCTION, ranks)

    def state(self) -> dict[str, Any]:
        """Return the state of training, for ``load``."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state`` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def start() -> None:
    """Make Megatron work without CUDA; join the default process group that torchrun's environment names."""
    cpu.enable()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
