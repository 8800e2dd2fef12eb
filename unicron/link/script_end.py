"""The end of a user's script, behind the last step: its process is left to finish, and that is the task's end.

The result is written by then. Each rank reports so, and runs the rest of its script. Rank 0 waits at its end for the
ends of all others, which they note in the generation's store: process groups the script may have destroyed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from unicron.link.agent_link import AgentLink
from unicron.protocol import Finished

LOOK_S = 0.1
"""How often rank 0 looks whether the others have ended: soon beside the seconds that the end of a task takes."""


def begin(link: AgentLink, finished: Finished, store: dist.Store, world_size: int) -> None:
    """Report that the last step is done, and let the script go on to its end.

    Args:
        link: to the agent; ``at_end`` is called once the script has ended.
        finished: what this rank reports.
        store: of the generation.
        world_size: of the generation.
    """
    link.send(replace(finished, ended=False))
    link.progress(finished.step, "tail")
    link.at_end = partial(_end, link, finished, store, world_size)


def _end(link: AgentLink, finished: Finished, store: dist.Store, world_size: int) -> None:
    try:
        store.set(_key(finished.rank), "1")
        others = [_key(rank) for rank in range(1, world_size)] if finished.rank == 0 else []
        while others and not store.check(others):
            time.sleep(LOOK_S)
    except RuntimeError as err:
        # The store is on the node of rank 0. Without it nobody can tell, and this script has ended.
        print(f"unicron: the ends of the other ranks' scripts are not waited for: {err}", flush=True)
    link.send(finished)


def _key(rank: int) -> str:
    """Return the key in the generation's store by which a rank says that its script has ended."""
    return f"script-ended/{rank}"
