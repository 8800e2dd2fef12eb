"""torchft: a data-parallel replica group that fails is left out from the next step on (github.com/pytorch/torchft).

Before each step the living replica groups form a quorum, by heartbeats to a lighthouse. The step that a fault broke is
discarded. The others go on with a smaller batch: the samples of the missing group are not computed, so they do not
count as work. The group's processes start again, and take the state from a live group.
"""

from __future__ import annotations

from simulator.policies.parameters import common, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, LiveTiming
from simulator.policy import Policy

TORCHFT = Policy(
    name="torchft",
    title="torchft: replica left out",
    source="github.com/pytorch/torchft (read: src/lighthouse.rs)",
    scope="own",
    timing=LiveTiming(
        detection=Detection(
            node_s=value("torchft", "heartbeat_timeout_s"),
            process_s=value("torchft", "heartbeat_timeout_s"),
            exception_s=value("torchft", "heartbeat_timeout_s"),
            hang_s=value("torchft", "manager_timeout_s"),
        ),
        checkpoint_every_s=value("torchft", "checkpoint_every_s"),
        pause_s=common("communicators_s"),
        start_s=common("process_start_s"),
        lost="step",
    ),
    solve=solve_without_taking,
    detects_slow=False,
    efficiency=value("torchft", "efficiency"),
    replica_granular=True,
    assumptions=(
        "A replica group is a replica of the allotment's layout; a group that lacks a worker does nothing.",
        "The pause is one set-up of communicators; the state reaches a group at the rate of the network.",
        "Nobody looks for slow workers.",
    ),
)
