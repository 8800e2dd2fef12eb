"""Bamboo: each node also computes the forward passes of its successor in the pipeline (Thorpe et al., NSDI'23).

Redundant passes fill pipeline bubbles as far as they fit. When a node is lost, its predecessor has its layers and its
activations, catches up on the backward passes, and the pipeline goes on without a restart. Only if neighbours are lost
together, the task starts from its newest checkpoint.
"""

from __future__ import annotations

from simulator.policies.parameters import common, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, LiveTiming
from simulator.policy import Policy

BAMBOO = Policy(
    name="bamboo",
    title="Bamboo: redundant computation",
    source="Thorpe et al., Bamboo, NSDI'23, arXiv 2204.12013",
    scope="own",
    timing=LiveTiming(
        detection=Detection(
            node_s=value("bamboo", "detection_s"),
            process_s=value("bamboo", "detection_s"),
            exception_s=value("bamboo", "detection_s"),
            hang_s=common("collective_timeout_s"),
        ),
        checkpoint_every_s=value("bamboo", "checkpoint_every_s"),
        pause_s=common("communicators_s"),
        pause_steps=value("bamboo", "failover_steps"),
        start_s=common("process_start_s"),
        lost="nothing",
    ),
    solve=solve_without_taking,
    detects_slow=False,
    efficiency=1.0 / (1.0 + value("bamboo", "redundant_overhead")),
    assumptions=(
        "A pipeline that has lost a node goes on at the rate of the remaining workers; the paper's pipelines are then "
        "unbalanced, and slower than that.",
        "State counts as lost where no live replica has it: the paper's neighbours hold more, one node each.",
        "The paper gives a pipeline half as many nodes again; here it has the workers of all systems.",
        "Nobody looks for slow workers.",
    ),
)
