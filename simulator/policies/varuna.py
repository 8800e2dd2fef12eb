"""Varuna: checkpoint, and restart in the best configuration of the nodes that are left (Athlur et al., EuroSys'22).

A manager keeps the list of nodes. When it changes, or a rank reports a fault, all processes end and the job starts
again from the newest checkpoint, with other pipeline and data-parallel sizes ("job morphing"). Gradients are
accumulated so that the batch stays the same. All activations are recomputed.
"""

from __future__ import annotations

from simulator.policies.parameters import common, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, RestartTiming
from simulator.policy import Policy

HANG_CHECKS = 1.5
"""Intervals of the progress check from a hang to its detection, on average: a check finds that no step was done since
the one before. The hang begins at any time after a check, half an interval before the next on average."""

VARUNA = Policy(
    name="varuna",
    title="Varuna: checkpoint and morph",
    source="Athlur et al., Varuna, EuroSys'22, arXiv 2111.04007; github.com/microsoft/varuna",
    scope="own",
    timing=RestartTiming(
        detection=Detection(
            node_s=value("varuna", "node_detection_s"),
            process_s=value("varuna", "node_detection_s"),
            exception_s=value("varuna", "node_detection_s"),
            hang_s=HANG_CHECKS * value("varuna", "progress_check_s"),
        ),
        checkpoint_every_s=value("varuna", "checkpoint_every_s"),
        failed_s=value("varuna", "wait_s") + common("process_start_s"),
        planned_s=common("process_start_s"),
        loads=True,
    ),
    solve=solve_without_taking,
    efficiency=value("varuna", "efficiency"),
    assumptions=(
        "The configuration of each count is the throughput model's best, with tensor parallelism, which Varuna lacks.",
        "A morph without a fault writes a checkpoint first, so no step is computed again.",
        "Processes start as fast as published for a restart in place; the paper's time is not known.",
        "Slow nodes are found, as the paper's manager finds them, and handled as the live planner handles them.",
    ),
)
