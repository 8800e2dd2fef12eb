"""The training loop's side of the runtime: steps that survive the loss of peers.

    run = unicron.attach(steps=1000, micro_batches=16, build=build)
    for step in run.steps():
        with step:
            for k in step.micro_batches():
                ids = sample_ids(step.number, k)
                loss = forward_backward(run.model, batch(ids), scale=1 / 16)
                step.commit(k, loss, ids)
            step.reduce()
            run.optimizer.step()

A broken collective or a held generation leaves the ``with`` block without an exception; the next step that the loop
yields is the same one again, in a new generation, with the micro-batches that are still missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from unicron import checkpoint, failures, generation
from unicron.errors import Interrupted, UnicronError
from unicron.faults import Fault, SignalledFault
from unicron.memory import Memory
from unicron.pieces import torch_optimizers
from unicron.protocol import Checkpointed, Configure, Finished, Resumed, Stopped
from unicron.replica import Replica
from unicron.runtime import DRAIN, STOP, Runtime
from unicron.step import Step

Build = Callable[[int, int], tuple[Any, Any]]
"""(tensor, pipeline) -> (model, optimizer), built in the process groups that exist when it is called."""


class Run:
    """A task's training in this process, over all its generations."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        steps: int,
        micro_batches: int,
        build: Build,
        initialise: Callable[[Any], None] | None = None,
        checkpoint_every: int = 0,
        checkpoint_directory: str = "",
        checkpoint_keep: int = 2,
        memory_every: int = 0,
        exact: bool = False,
    ) -> None:
        """Prepare a run.

        Args:
            runtime: the link to the agent.
            steps: updates to apply.
            micro_batches: M, in one update; gradients are scaled by 1/M by the loop.
            build: makes model and optimizer.
            initialise: sets the model's first parameters, the same on every rank; without it rank 0's are used.
            checkpoint_every: steps between checkpoints; 0: only when stopped.
            checkpoint_directory: where they go; empty: the generation's own directory.
            checkpoint_keep: how many of them to leave; at least 2.
            memory_every: steps between in-memory copies, where an agent says where they go; 0: none.
            exact: whether gradients are added up exactly.
        """
        self.runtime = runtime
        self.total = steps
        self.micro_batches = micro_batches
        self.request = 0
        self.source = ""
        self.checkpoint_every, self._checkpoints = checkpoint_every, checkpoint_directory
        self._writer = checkpoint.Writer(checkpoint_keep)
        self._due = False
        self._faults = Fault.from_environment()
        self._signalled_fault = SignalledFault()
        self._current: Configure | None = None
        self.memory = Memory(memory_every, runtime.wait)
        self._joined = generation.Joined(build, initialise, self.memory, exact=exact)
        self._loss: float | None = None

    @property
    def replica(self) -> Replica:
        """The rank's state."""
        assert self._joined.replica is not None
        return self._joined.replica

    def _applied(self) -> int:
        """Return the updates applied to the state held, 0 if none is held."""
        return max(0, self._joined.replica.applied) if self._joined.replica is not None else 0

    @property
    def model(self) -> Any:
        """The model built for the current layout."""
        return self.replica.model

    @property
    def optimizer(self) -> Any:
        """The optimizer built for the current layout."""
        return self.replica.optimizer

    @property
    def configure(self) -> Configure:
        """The generation this process is in."""
        assert self._current is not None
        return self._current

    def fault(self, step: int, at: str) -> None:
        """Let an injected fault happen here."""
        self._signalled_fault.reached(step, at)
        for fault in self._faults:
            fault.reached(step, at)

    def lay_fault(self, step: int, finished: int) -> None:
        """Let an injected fault happen inside the next micro-batch."""
        for fault in self._faults:
            fault.lay(step, finished, self.model)

    def lay_fault_in_update(self, step: int) -> None:
        """Let an injected fault happen inside the optimizer's step."""
        for fault in self._faults:
            fault.lay_in_update(step, torch_optimizers(self.optimizer)[0])

    def fails_between_buckets(self, step: int) -> bool:
        """Return whether an injected fault will come in the midst of this step's reduction."""
        return any(fault.step == step and fault.at.startswith("reduce:") for fault in self._faults)

    def steps(self) -> Iterator[Step]:
        """Yield the steps to do, through all generations, until the last one is applied everywhere."""
        drained = False
        while True:
            configure = self.runtime.configure(self._applied(), drained=drained)
            if configure is None:
                self._stopped("")
            drained = False
            self._begin_life(configure)
            self._current = configure
            if not self._attempt(self._enter):
                continue
            drained = yield from self._generation()
            if self.replica.applied == self.total and self._attempt(self._finish):
                return

    def _generation(self) -> Generator[Step, None, bool]:
        """Yield the steps of one generation until it ends; return whether it ended drained to a boundary."""
        if self.replica.applied == self.total:
            self._resumed(None)
        first = True
        while self.replica.applied < self.total:
            step = self._next_step()
            yield step
            if step.completed:
                self._loss = step.loss
            if step.left:
                return False
            if first:
                self._resumed(step)
                first = False
            if self.replica.applied == self.total:
                return False
            if self.request == DRAIN:
                return True
            self._due = self._due or (self.checkpoint_every > 0 and self.replica.applied % self.checkpoint_every == 0)
            if self.request == STOP and not self._attempt(self._checkpoint_and_stop):
                return False
            # One at a time: where the file system is slower than the interval, training does not wait for it.
            if self._due and self._writer.idle and not self._attempt(self._checkpoint):
                return False
            self.memory.take(self.replica)
        return False

    def heartbeat(self) -> None:
        """Tell that this rank is at work on something else than a step: evaluation, a file of the script's own.

        To be called between steps, before what takes longer than a step and then at least once in the agent's
        ``slow_region_timeout_s`` (120 s); else the rank counts as hanging. It lasts until the next step begins.
        """
        self.runtime.progress(self._applied(), "aside")

    # Between steps.

    def _begin_life(self, configure: Configure) -> None:
        """Keep the injected faults that are this process's: one that replaces another repeats none unless told to."""
        if self._current is None and self._faults:
            source = next((m[2] for m in configure.members if m[0] == configure.rank), "initial")
            replaces = source == "take" or configure.fault_step > 0
            self._faults = [f for f in self._faults if f.belongs_to(configure.rank, replaces=replaces)]

    def _enter(self) -> None:
        self.runtime.progress(self._applied() + 1, "setup")
        self.memory.leave()
        step = self._applied() + 1
        self._joined.enter(self.configure, self.runtime, self.micro_batches, lambda at: self.fault(step, at))
        self._due = self._due or not self._writer.idle  # what the last generation was writing is given up
        loaded = self._joined.checkpoint
        self._writer.enter(self._checkpoint_path(), self.configure.generation, loaded)
        self.memory.enter(self.configure.generation, self.replica)

    def _next_step(self) -> Step:
        number = self.replica.applied + 1
        self.replica.check_begins()
        if not self._joined.resumes:
            self.replica.begin(number, generation.own_share(self.micro_batches), self.configure.generation)
        self._joined.resumes = False
        assert self.replica.partial is not None
        return Step(self, number, self.replica.partial.work)

    def _resumed(self, step: Step | None) -> None:
        joined = self._joined
        phases = dict(joined.phases)
        total = time.monotonic() - step.began if step is not None else 0.0
        redistribute = step.computed_s if step is not None and joined.deal else 0.0
        phases |= {"redistribute": redistribute, "first_step": total - redistribute}
        self.runtime.send(
            Resumed(
                generation=self.configure.generation,
                step=self.replica.applied,
                source=joined.source,
                phases={k: round(v, 6) for k, v in phases.items()},
                # All ranks agreed on it; told by each, it would be as large as the square of their number.
                deal={str(r): ks for r, ks in enumerate(joined.deal)} if self.configure.rank == 0 else {},
                steps_recomputed=joined.steps_recomputed,
                computed=joined.computed,
                buckets_kept=joined.buckets_kept,
                buckets=self.replica.sums.buckets,
            )
        )
        shown = " ".join(f"{k}={v:.3f}" for k, v in phases.items())
        print(f"generation {self.configure.generation} from {joined.source}: {shown}", flush=True)

    def _checkpoint_path(self) -> Path:
        if self._checkpoints:
            root = Path(self._checkpoints) / f"generation-{self.configure.generation}"
        else:
            root = Path(self.configure.directory) / "checkpoints"
        return root / f"step-{self.replica.applied}"

    def _checkpoint(self) -> None:
        self._due = False
        self.runtime.progress(self.replica.applied, "checkpoint")
        self._writer.begin(self.replica, self._checkpoint_path())
        for fault in self._faults:
            fault.reached_after(self.replica.applied, "checkpoint")

    def _published(self) -> Callable[[int, Path], None]:
        """Return what tells the agent that a checkpoint of this generation is published."""
        runtime, number = self.runtime, self.configure.generation
        return lambda step, path: runtime.send(Checkpointed(generation=number, step=step, path=str(path)))

    def statuses(self) -> tuple[int, ...]:
        """Return what this rank tells at the end of a step: how far checkpoint and in-memory copy in hand are.

        And whether a checkpoint is due: only who was there when a fault interrupted one knows it.
        """
        return self._writer.status, self.memory.status, int(self._due)

    def agreed(self, statuses: list[int]) -> None:
        """Take what all ranks told. The state may change once this returns."""
        self._writer.agreed(statuses[0], self._published())
        self.memory.wait_copied()
        self.memory.agreed(statuses[1])
        self._due = bool(statuses[2])

    def _checkpoint_and_stop(self) -> None:
        """Write the checkpoint that a stop leaves behind, and wait for it."""
        self.runtime.progress(self.replica.applied, "checkpoint")
        self._writer.complete(self._published())
        self._checkpoint()
        path = self._checkpoint_path()
        if not self._writer.complete(self._published()):
            raise UnicronError(f"the checkpoint of step {self.replica.applied} could not be written")
        self._stopped(str(path))

    def _stopped(self, path: str) -> NoReturn:
        runtime = self.runtime
        runtime.send(Stopped(generation=runtime.generation, rank=runtime.rank, step=self._applied(), path=path))
        self.runtime.exit(0)

    def _finish(self) -> None:
        configure, replica = self.configure, self.replica
        self.runtime.progress(replica.applied, "checkpoint")
        self._writer.complete(self._published())
        path = Path(configure.directory) / "result" / "parameters.safetensors"
        checkpoint.export(replica, path)
        first = configure.rank == 0
        if first:
            summary = {"steps": replica.applied, "samples_sha256": replica.digest.hex(), "loss": self._loss}
            path.with_name("summary.json").write_text(json.dumps(summary) + "\n")
        dist.barrier()
        self.runtime.send(
            Finished(
                generation=configure.generation,
                rank=configure.rank,
                step=replica.applied,
                samples_sha256=replica.digest.hex() if first else "",
                parameters_path=str(path) if first else "",
                loss=self._loss,
            )
        )

    # Failures.

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do something that needs the peers; return False if a new generation has to answer."""
        try:
            self.runtime.enter()
            action()
            self.runtime.synchronize()
        except Exception as error:
            self.runtime.leave()
            if not self.survives(error):
                raise
            return False
        self.runtime.leave()
        return True

    def survives(self, error: BaseException) -> bool:
        """Report an error; return whether the process goes on in a new generation. Ends a supervised process if not."""
        if not isinstance(error, Exception):
            return False
        runtime = self.runtime
        broken = failures.is_communication(error)
        # Where aborted collectives leave garbage, that may have led to any error.
        aborted = runtime.is_held() and (broken or runtime.blind)
        if runtime.supervised and (isinstance(error, Interrupted) or aborted):
            failures.forget_frames(error)
            return True
        failures.report(runtime, error, step=self._applied() + 1)
        if broken and runtime.supervised:
            failures.forget_frames(error)
            return True
        if runtime.supervised:
            runtime.exit(1)
        return False
