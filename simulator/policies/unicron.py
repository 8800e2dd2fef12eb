"""Unicron: the planner divides the whole cluster anew, survivors finish the interrupted step, state comes from memory.

``unicron-paper`` is the system as published (He et al., arXiv 2401.00134): the detection times of its table 2, and the
one-step objective of section 5. ``unicron`` is this project's: the live planner with all that it adds, and the times
measured here. Both decide by the very code of the running system (``services.planner``).

What a transition takes on GPUs was never measured here, and the paper's figure is not known. It is modelled: a set-up
of communicators as published for a cluster of this kind, the start of processes where there are newcomers, and the
bytes of the state over the hardware's network. Survivors keep the gradients that they have summed, so no step is lost.
Where no live replica has the state, its copies in memory do, and the interrupted step is lost.
"""

from __future__ import annotations

from shared.planning.solver import solve_with_alternatives
from simulator.policies.parameters import common, value
from simulator.policies.timing import Detection, LiveTiming
from simulator.policy import ONE_STEP, Policy

UNICRON_PAPER = Policy(
    name="unicron-paper",
    title="Unicron as published",
    source="He et al., Unicron, arXiv 2401.00134, tables 1 and 2, sections 4 to 6",
    scope="cluster",
    timing=LiveTiming(
        detection=Detection(
            node_s=value("unicron-paper", "node_detection_s"),
            process_s=value("unicron-paper", "process_detection_s"),
            exception_s=value("unicron-paper", "exception_detection_s"),
            hang_s=0.0,
            hang_steps=value("unicron-paper", "statistics_detection_steps"),
        ),
        checkpoint_every_s=value("unicron-paper", "checkpoint_every_s"),
        pause_s=common("communicators_s"),
        start_s=common("process_start_s"),
        lost="nothing",
        has_copies=True,
    ),
    solve=solve_with_alternatives,
    parameters=ONE_STEP,
    assumptions=(
        "The transition is modelled: one set-up of communicators, the state's bytes over the network, and processes "
        "that start as published for restarts in place, while survivors train on.",
        "Copies of the state in memory cost no throughput (GEMINI, SOSP'23, which the paper builds on).",
        "Slow workers are handled as the live planner handles them.",
    ),
)

UNICRON = Policy(
    name="unicron",
    title="Unicron, this project",
    source="docs/detector.md, docs/planner.md, docs/transition.md, docs/recovery.md",
    scope="cluster",
    timing=LiveTiming(
        detection=Detection(
            node_s=value("unicron", "node_detection_s"),
            process_s=value("unicron", "process_detection_s"),
            exception_s=value("unicron", "exception_detection_s"),
            hang_s=value("unicron", "statistics_detection_floor_s"),
            hang_steps=value("unicron", "statistics_detection_steps"),
            hang_gaps=value("unicron", "statistics_detection_gaps"),
            link_s=value("unicron", "link_detection_s"),
        ),
        checkpoint_every_s=value("unicron", "checkpoint_every_s"),
        pause_s=value("unicron", "hold_s") + common("communicators_s"),
        start_s=value("unicron", "process_start_s"),
        lost="nothing",
        has_copies=True,
    ),
    solve=solve_with_alternatives,
    parameters={},
    assumptions=(
        "Detection was measured on CPUs; nothing in it depends on the device.",
        "The transition is scaled to GPUs: the hold as measured on CPUs, communicators as published, the state's bytes "
        "over the network, and a process start of which the CUDA part was never measured.",
        "Copies of the state in memory cost no throughput: the 1.2% measured are of CPUs that also compute.",
    ),
)
