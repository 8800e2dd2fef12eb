"""ReCycle: micro-batches of a lost worker go to its data-parallel peers (Gandhi et al., SOSP'24).

Peers of the same stage have the same parameters, and the pipeline's bubbles have room for some of the work. Decoupled
backward passes and a staggered optimizer make more of it fit. Nothing is moved and nothing is read; the interrupted
step is computed again. A worker that returns copies the parameters of a peer.
"""

from __future__ import annotations

from simulator.policies.parameters import common, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, LiveTiming
from simulator.policy import Policy

RECYCLE = Policy(
    name="recycle",
    title="ReCycle: micro-batches rerouted",
    source="Gandhi et al., ReCycle, SOSP'24, arXiv 2405.14009",
    scope="own",
    timing=LiveTiming(
        detection=Detection(
            node_s=value("recycle", "detection_s"),
            process_s=value("recycle", "detection_s"),
            exception_s=value("recycle", "detection_s"),
            hang_s=common("collective_timeout_s"),
        ),
        checkpoint_every_s=value("recycle", "checkpoint_every_s"),
        pause_s=common("communicators_s"),
        start_s=common("process_start_s"),
        lost="step",
    ),
    solve=solve_without_taking,
    detects_slow=False,
    efficiency=value("recycle", "efficiency"),
    assumptions=(
        "With x of N workers left the task achieves what the throughput model says of x workers: rerouted work fills "
        "bubbles only in so far as the best layout of x workers has fewer of them.",
        "Nobody looks for slow workers.",
    ),
)
