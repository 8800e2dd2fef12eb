"""What a new agent finds: the record of its predecessor beside the processes that the fork server has. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.agent.node.process import Process
from services.agent.node.record import NodeRecord, StoreRecord
from services.agent.ranks.fork_server import Children

ATTACH_S = 1.0
"""How long an agent waits for the ranks of its predecessor before it is seen: they attach within milliseconds. A rank
that is stopped does not."""


@dataclass(slots=True)
class Found:
    """What has become of the processes.

    Attributes:
        running: processes of the record that live, each with its pid.
        stores: the same for rendezvous stores.
        never_forked: processes of the record that the fork server was never asked for.
        gone: processes of the record that ended with an earlier fork server.
        unwanted: process id -> pid of living processes that are in no record: the request for them has no answer yet.
    """

    running: list[tuple[Process, int]] = field(default_factory=list)
    stores: list[tuple[StoreRecord, int]] = field(default_factory=list)
    never_forked: list[Process] = field(default_factory=list)
    gone: list[Process] = field(default_factory=list)
    unwanted: dict[str, int] = field(default_factory=dict)


def compare(left: NodeRecord, processes: list[Process], children: Children) -> Found:
    """Return what the record and the fork server's children have in common, and what not.

    Args:
        left: of the predecessor.
        processes: of the record, in their slots.
        children: of the fork server. The ends in it are reported like any other.
    """
    found = Found(unwanted=dict(children.living))
    for process in processes:
        pid = found.unwanted.pop(process.id, None)
        if pid is not None:
            found.running.append((process, pid))
        elif process.id in children.ended:
            continue
        elif process.pid is None:
            found.never_forked.append(process)
        else:
            found.gone.append(process)
    for store in left.stores:
        if (pid := found.unwanted.pop(store.id, None)) is not None:
            found.stores.append((store, pid))
    return found
