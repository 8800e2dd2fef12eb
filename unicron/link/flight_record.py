"""What torch's flight recorder says about this process's collectives: those entered, and those that have not ended.

Torch records each collective of gloo and NCCL in a ring in memory (before 2.11 only where it is told to, which
``unicron.join.groups`` does), so a report costs the step nothing. Groups count their collectives; the counts of all
ranks of a group show who has not entered the newest one. Sends and receives count too, on the two ranks that they are
between; gloo does not record them.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

MOST_GROUPS = 64
"""Most groups in one report; see ``COLLECTIVE_GROUPS`` in ``shared.events.evidence``."""

MOST_WAITS = 8
"""Most collectives of one group in one report; see ``OPERATIONS`` there."""


def groups() -> list[list[Any]]:
    """Return name, ranks, number of collectives entered, and ``[number, operation]`` of those that have not ended.

    The answer has each group of several ranks that this process is in. This runs beside the training thread, which may
    make or destroy groups meanwhile, and the recorder is no public part of torch. So if something fails, there is only
    less to report.
    """
    try:
        return _groups() if dist.is_initialized() else []
    except Exception:
        return []


def _groups() -> list[list[Any]]:
    world: Any = dist.distributed_c10d._world
    entries = _recorded()
    found: list[list[Any]] = []
    for group, name in list(world.pg_names.items()):
        ranks = sorted(world.pg_group_ranks.get(group, {}))
        if len(ranks) > 1:
            entered = int(group._get_sequence_number_for_group())
            found.append([name, ranks, entered, _waits(entries, name, entered)])
    return found[:MOST_GROUPS]


def _recorded() -> list[dict[str, Any]]:
    """Return the entries of the recorder of the backend in use, the oldest first; none if it records nothing."""
    c10d: Any = torch._C._distributed_c10d
    dump = c10d._dump_nccl_trace_json if dist.get_backend() == "nccl" else c10d._dump_fr_trace_json
    entries = json.loads(dump(True, False)).get("entries", [])
    return [entry for entry in entries if not entry["retired"] and not entry["is_p2p"]]


def _waits(entries: list[dict[str, Any]], name: str, entered: int) -> list[list[Any]]:
    """Return number and operation of the collectives of a group that have not ended.

    A group of an earlier generation may have had the name: groups have rising numbers in a process.
    """
    own = [entry for entry in entries if entry["process_group"][0] == name]
    newest = max((entry["pg_id"] for entry in own), default=0)
    return [
        [entry["collective_seq_id"], str(entry["profiling_name"])]
        for entry in own
        if entry["pg_id"] == newest and entry["collective_seq_id"] <= entered and entry["state"] != "completed"
    ][:MOST_WAITS]
