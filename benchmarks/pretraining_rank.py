"""One rank of ``benchmarks.pretraining``: Megatron-LM's own script, stock or with the adapter.

    python -m benchmarks.pretraining_rank stock|unicron SCRIPT FOLDER ARGS...

``rank-<rank>.json`` gets the CPU-seconds of this rank between two calls of ``training_log``, which ``train()`` calls
behind each step.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.overhead_rank import keep_memory
from tests.megatron_lm import cpu


def main(mode: str, script: str, folder: Path, arguments: list[str]) -> None:
    """Be the rank."""
    keep_memory()
    sys.path.insert(0, str(Path(script).parent))
    cpu.apply()
    import megatron.training.training as training

    ends_s: list[float] = []
    log = training.training_log

    @functools.wraps(log)
    def logged(*args: Any, **kwargs: Any) -> Any:
        ends_s.append(time.process_time())
        return log(*args, **kwargs)

    training.training_log = logged
    if mode == "stock":
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
    else:
        from unicron.megatron_lm import run_script

        run_script(script, arguments)
    steps = [later - earlier for earlier, later in itertools.pairwise(ends_s)]
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
