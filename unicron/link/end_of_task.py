"""The end of a task: all ranks meet behind the last step, and a user's script is left to finish.

The ranks meet through the generation's store and not in a collective. A collective of NCCL has ended for a rank while
the last of what it sends is still in the process's memory (nccl: src/transport/net.cc, ``sendProxyProgress``): if the
process ends then, its peers wait for ever. The store is a process of its own.

Where there is a script, each rank reports that the last step is done, and runs the rest of it. Rank 0 waits at its end
for the ends of all others, which they note in the store: process groups the script may have destroyed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from unicron.link.agent_link import AgentLink
from unicron.protocol.messages import Finished

LOOK_S = 0.1
"""Longest pause between two looks whether the others have come, or ended: short beside the seconds that a task's end
takes."""

FIRST_LOOK_S = 0.001
"""How long a rank waits before it looks for the first time whether the others have come: mostly they come together."""

FINISHED = "finished"
"""The end of the task, as a place where ranks meet."""


def meet(store: dist.Store, world_size: int, waits: Callable[[], None], place: str = FINISHED) -> None:
    """Wait until all ranks have come here.

    Args:
        store: the generation's.
        world_size: the generation's.
        waits: called once in a while meanwhile; raises an error if this rank is to wait no longer.
        place: the name of this place, at which each rank comes once in a generation.

    Raises:
        RuntimeError: the store does not answer.
    """
    all_arrived = f"{place}/all"
    if store.add(place, 1) == world_size:
        store.set(all_arrived, "1")
    pause_s = FIRST_LOOK_S
    while not store.check([all_arrived]):
        waits()
        time.sleep(pause_s)
        pause_s = min(2.0 * pause_s, LOOK_S)


def begin(link: AgentLink, finished: Finished, store: dist.Store, world_size: int) -> None:
    """Report that the last step is done, and let the script go on to its end.

    Args:
        link: to the agent; ``at_end`` is called once the script has ended.
        finished: what this rank reports.
        store: the generation's.
        world_size: the generation's.
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
        # The store is on the node of rank 0. Without the store nobody can tell, and this script has ended.
        print(f"unicron: the ends of the other ranks' scripts are not waited for: {err}", flush=True)
    link.send(finished)


def _key(rank: int) -> str:
    """Return the key in the generation's store by which a rank says that its script has ended."""
    return f"script-ended/{rank}"
