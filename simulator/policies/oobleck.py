"""Oobleck: pipelines of several sizes, made from templates that fit any number of nodes (Jang et al., SOSP'23).

f + 1 replicas of the state tolerate f lost nodes. A pipeline that has lost a node is replaced by one of a smaller
template; layers that it lacks are copied from live replicas, so nothing is read from storage. The interrupted step is
computed again. When too few replicas are left, the task starts from its newest checkpoint.
"""

from __future__ import annotations

from simulator.policies.parameters import common, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, LiveTiming
from simulator.policy import Policy

OOBLECK = Policy(
    name="oobleck",
    title="Oobleck: pipeline templates",
    source="Jang et al., Oobleck, SOSP'23, arXiv 2309.08125",
    scope="own",
    timing=LiveTiming(
        detection=Detection(
            node_s=value("oobleck", "detection_s"),
            process_s=value("oobleck", "detection_s"),
            exception_s=value("oobleck", "detection_s"),
            hang_s=common("collective_timeout_s"),
        ),
        checkpoint_every_s=value("oobleck", "checkpoint_every_s"),
        pause_s=value("oobleck", "reconfiguration_s"),
        start_s=common("process_start_s"),
        lost="step",
    ),
    solve=solve_without_taking,
    detects_slow=False,
    efficiency=value("oobleck", "efficiency"),
    assumptions=(
        "Pipelines of different sizes achieve what the throughput model says of the best equal layout of as many "
        "workers.",
        "A node that returns joins by another reconfiguration; the paper's first version had none.",
        "Nobody looks for slow workers.",
    ),
)
