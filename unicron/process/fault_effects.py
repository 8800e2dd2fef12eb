"""What injected faults do that neither end a process nor stop it: to numbers, to the time of the passes, to memory.

``unicron.process.faults`` says when.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHUNK_BYTES = 64 << 20
"""What an injected ``oom`` allocates at once: a control group's limit is reached within some dozens of these."""

FIRST_TO_GO = "1000"
"""``oom_score_adj`` of the process that the kernel is to end before all others (proc(5))."""


def put_non_finite(chunks: Sequence[Any], name: str) -> bool:
    """Make one element of a parameter's gradient NaN in the next backward pass; return whether there is such a one.

    The hook of the parameter sees the gradient before it is added to the sums, as a kernel that overflows would leave
    it. Parameters stay as they are: what is not finite ends the step before its update.

    Args:
        chunks: the modules of the rank's model.
        name: of the parameter, as ``named_parameters`` has it, or its end; empty: the first one.
    """
    named = [(n, p) for chunk in chunks for n, p in chunk.named_parameters() if p.requires_grad]
    found = next((p for n, p in named if not name or n == name or n.endswith(f".{name}")), None)
    if found is None:
        return False
    hook: Any = None

    def spoil(gradient: Any) -> Any:
        hook.remove()
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = float("nan")
        return spoiled

    hook = found.register_hook(spoil)
    return True


def use_up_memory(limit_bytes: int) -> None:
    """Allocate until the kernel ends this process for memory: first of all those in its control group.

    Args:
        limit_bytes: of the control group; no more than that is allocated.

    Raises:
        MemoryError: the kernel has not, and lets nothing more be allocated.
        OSError: the kernel does not let this process be the first to go; nothing was allocated.
    """
    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    # Written, not only asked for: the kernel counts pages when they are touched.
    taken = [b"\x01" * CHUNK_BYTES for _ in range(limit_bytes // CHUNK_BYTES + 1)]
    raise MemoryError(f"{len(taken)} x {CHUNK_BYTES} bytes were allocated, and the kernel ended nothing")


class Slowness:
    """A rank that takes ``factor`` times as long for its passes.

    It sleeps after each micro-batch, before that counts as done: as a device that is slower keeps its process waiting.
    So the machine's other processes do not get slower with it.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._began_s: float | None = None

    def begin(self) -> None:
        """Note that the passes of a micro-batch begin."""
        self._began_s = time.monotonic() if self.factor > 1.0 else None

    def end(self) -> None:
        """Sleep for what the passes were too fast; several micro-batches may end between two calls of ``begin``."""
        if self._began_s is None:
            return
        time.sleep((self.factor - 1.0) * (time.monotonic() - self._began_s))
        self._began_s = time.monotonic() if self.factor > 1.0 else None


def announce(fault_id: str, text: str) -> None:
    """Print that a fault happens now, with the time on the machine's clock: measurements begin there."""
    print(f"unicron: injected fault {fault_id}: {text}; unix time {time.time():.6f}", file=sys.stderr, flush=True)
