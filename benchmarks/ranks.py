"""Ranks of a benchmark that trains without the stack: processes under one rendezvous store, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shared.errors import UnicronError

POLL_S = 0.05
"""Time between two looks at whether a rank has ended; a run takes minutes."""

ERROR_BYTES = 2000
"""Length of the end of a failed rank's output that its error shows."""


class RankFailed(UnicronError):
    """A rank ended with an exit status other than 0."""

    code = "rank-failed"


def run_ranks(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    ranks: int,
    *,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[Any]:
    """Run a module as every rank to its end; return what each rank measured.

    No rank is left when this returns or raises: where one fails, the others, which would wait for it in a collective
    for half an hour, are killed.

    Args:
        module: each rank writes what it measured to ``rank-<rank>.json`` in the folder.
        arguments: of the module.
        folder: of the run; ``rank-<rank>.err`` has a rank's standard error.
        ranks: their number.
        environment: further variables of a rank.

    Raises:
        RankFailed: a rank failed; the message has the end of its standard error.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children: list[subprocess.Popen[bytes]] = []
    with ExitStack() as cleanup:
        for rank in range(ranks):
            variables = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            }
            with (folder / f"rank-{rank}.err").open("wb") as errors:
                child = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    env={**variables, **environment(rank)},
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            children.append(child)
            cleanup.callback(_kill, child)
        _wait(children, folder)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def _wait(children: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until every rank has ended well, or one has failed."""
    while True:
        codes = [child.poll() for child in children]
        for rank, code in enumerate(codes):
            if code:
                errors = (folder / f"rank-{rank}.err").read_bytes()[-ERROR_BYTES:].decode(errors="replace")
                raise RankFailed(f"rank {rank} ended with {code}: {errors}")
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_S)


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
