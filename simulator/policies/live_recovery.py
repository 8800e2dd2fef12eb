"""Published systems whose tasks train on without a restart, on the workers that are left.

Bamboo (Thorpe et al., NSDI'23): each node also computes the forward passes of its successor in the pipeline, which fill
pipeline bubbles as far as they fit. When a node is lost, its predecessor has its layers and its activations, catches up
on the backward passes, and the pipeline goes on without a restart. Only if neighbours are lost together, the task
starts from its newest checkpoint.

Oobleck (Jang et al., SOSP'23): pipelines have several sizes, made from templates that fit any number of nodes. f + 1
replicas of the state tolerate f lost nodes. A pipeline that has lost a node is replaced by one of a smaller template;
layers that it lacks are copied from live replicas, so nothing is read from storage. The interrupted step is computed
again. When too few replicas are left, the task starts from its newest checkpoint.

ReCycle (Gandhi et al., SOSP'24): micro-batches of a lost worker go to its data-parallel peers. Peers of the same stage
have the same parameters, and the pipeline's bubbles have room for some of the work. Decoupled backward passes and a
staggered optimizer make more of it fit. Nothing is moved and nothing is read; the interrupted step is computed again. A
worker that returns copies the parameters of a peer.

torchft (github.com/pytorch/torchft): before each step the living replica groups form a quorum, by heartbeats to a
lighthouse. A group that fails is left out from the next step on, and the step that the fault broke is discarded. The
others go on with a smaller batch: the samples of the missing group are not computed, so they do not count as work. The
group's processes start again, and take the state from a live group.
"""

from __future__ import annotations

from typing import Any

from simulator.policies.parameters import common, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, LiveTiming
from simulator.policy import Lost, Policy


def _policy(
    name: str,
    *assumptions: str,
    detected_by: str = "detection_s",
    hang_s: float | None = None,
    pause_s: float | None = None,
    pause_steps: float = 0.0,
    lost: Lost = "step",
    **others: Any,
) -> Policy:
    """Return a policy.

    Args:
        name: its name; its numbers are the parameters of that name.
        assumptions: as of ``Policy``, without that of slow workers.
        detected_by: the parameter that says when all faults but hangs are found.
        hang_s: when hangs are found; None: at the time-out of a collective.
        pause_s: for how long tasks pause at a change; None: for a set-up of communicators.
        pause_steps: as of ``LiveTiming``.
        lost: as of ``LiveTiming``.
        others: further fields of ``Policy``.
    """
    found_s = value(name, detected_by)
    hang_s = common("collective_timeout_s") if hang_s is None else hang_s
    return Policy(
        name=name,
        scope="own",
        timing=LiveTiming(
            detection=Detection(node_s=found_s, process_s=found_s, exception_s=found_s, hang_s=hang_s),
            checkpoint_every_s=value(name, "checkpoint_every_s"),
            pause_s=common("communicators_s") if pause_s is None else pause_s,
            pause_steps=pause_steps,
            start_s=common("process_start_s"),
            lost=lost,
        ),
        solve=solve_without_taking,
        detects_slow=False,
        assumptions=(*assumptions, "Nobody looks for slow workers."),
        **others,
    )


BAMBOO = _policy(
    "bamboo",
    "A pipeline that has lost a node goes on at the rate of the remaining workers; the paper's pipelines are then "
    "unbalanced, and slower than that.",
    "State counts as lost where no live replica has it: the paper's neighbours hold more, one node each.",
    "The paper gives a pipeline half as many nodes again; here it has the workers of all systems.",
    pause_steps=value("bamboo", "failover_steps"),
    lost="nothing",
    title="Bamboo: redundant computation",
    source="Thorpe et al., Bamboo, NSDI'23, arXiv 2204.12013",
    efficiency=1.0 / (1.0 + value("bamboo", "redundant_overhead")),
)

OOBLECK = _policy(
    "oobleck",
    "Pipelines of different sizes achieve what the throughput model says of the best equal layout of as many workers.",
    "A node that returns joins by another reconfiguration; the paper's first version had none.",
    pause_s=value("oobleck", "reconfiguration_s"),
    title="Oobleck: pipeline templates",
    source="Jang et al., Oobleck, SOSP'23, arXiv 2309.08125",
    efficiency=value("oobleck", "efficiency"),
)

RECYCLE = _policy(
    "recycle",
    "With x of N workers left the task achieves what the throughput model says of x workers: rerouted work fills "
    "bubbles only in so far as the best layout of x workers has fewer of them.",
    title="ReCycle: micro-batches rerouted",
    source="Gandhi et al., ReCycle, SOSP'24, arXiv 2405.14009",
    efficiency=value("recycle", "efficiency"),
)

TORCHFT = _policy(
    "torchft",
    "A replica group is a replica of the allotment's layout; a group that lacks a worker does nothing.",
    "The pause is one set-up of communicators; the state reaches a group at the rate of the network.",
    detected_by="heartbeat_timeout_s",
    hang_s=value("torchft", "manager_timeout_s"),
    title="torchft: replica left out",
    source="github.com/pytorch/torchft (read: src/lighthouse.rs)",
    efficiency=value("torchft", "efficiency"),
    replica_granular=True,
)
