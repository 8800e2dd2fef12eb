"""Megatron-LM under a scheduler: a task that fails is submitted again (Unicron paper, section 2 and figure 2).

A fault stops the whole task. Survivors notice it by the time-out of a collective, 30 minutes; the loss of a node shows
sooner. Then the task waits in the queue, sets up its environment and reads the newest checkpoint: 9 and 14 minutes.
Steps since that checkpoint are computed again, 15 minutes of work on average. The task needs as many workers as before.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.policies.parameters import common, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, RestartTiming
from simulator.policy import Policy

TIMEOUT_S = common("collective_timeout_s")

MEGATRON = Policy(
    name="megatron",
    title="Megatron-LM, restarted",
    source="He et al., Unicron, arXiv 2401.00134, section 2 and figure 2 (manual recovery, 68 minutes)",
    scope="fixed",
    timing=RestartTiming(
        detection=Detection(
            node_s=value("megatron", "node_detection_s"),
            process_s=TIMEOUT_S,
            exception_s=TIMEOUT_S,
            hang_s=TIMEOUT_S,
        ),
        checkpoint_every_s=value("megatron", "checkpoint_every_s"),
        failed_s=value("megatron", "queue_s") + value("megatron", "environment_s"),
        planned_s=value("megatron", "queue_s") + value("megatron", "environment_s"),
        loads=False,
    ),
    solve=solve_without_taking,
    detects_slow=False,
    assumptions=(
        "Every fault, also a light one, takes the way of the paper's figure 2; the environment includes reading the "
        "checkpoint.",
        "A task that lacks a node waits until it can have all its workers again, and others may use its free ones.",
        "Checkpoints are 30 minutes apart and cost no time.",
        "Nobody looks for slow workers.",
    ),
)

MEGATRON_SPARES = replace(
    MEGATRON,
    name="megatron-spares",
    title="Megatron-LM with a hot spare",
    spare_nodes=int(value("megatron-spares", "spare_nodes")),
    assumptions=(
        "One node of the cluster is kept free and replaces the first lost node at once; a returning node is the next "
        "spare.",
        *MEGATRON.assumptions,
    ),
)
