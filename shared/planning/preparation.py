"""Compiles the solver's kernels, so that no problem has to wait for it: a process of its own, once for each version.

    python -P -m shared.planning.preparation

The planner of a large cluster starts it.
"""

from __future__ import annotations

import os
import signal

from shared.events.plans import Problem, TaskProblem
from shared.machine.process import die_with_parent
from shared.planning import compiled
from shared.planning.solver import solve_with_alternatives, solve_with_proof

WORKERS_FROM = 512
"""Workers of a cluster from which compiling is worth its tens of seconds: plain Python takes milliseconds below."""


def stay_behind() -> None:
    """Have this process take only time that no other wants, and end with its parent."""
    die_with_parent(signal.SIGKILL)
    os.nice(19)


def prepare() -> None:
    """Compile all kernels, by solving a small problem with each; where numba is not installed, do nothing."""
    if not compiled.can_compile() or compiled.is_prepared():
        return
    compiled.load()
    for posed in (_problem(dropped=True), _problem(dropped=False)):
        solve_with_alternatives(posed)
        solve_with_proof(posed)
    compiled.note_prepared()


def _problem(*, dropped: bool) -> Problem:
    """Return a problem of two tasks, with counts that are dropped at once or with none, which has to be searched."""
    rates = {count: 1e14 * (min(count, 3) if dropped else count) for count in range(1, 9)}
    tasks = [
        TaskProblem(
            name=name,
            weight=1.0,
            necessary=1,
            maximum=8,
            current=4,
            faulted=name == "a",
            transition_s=60.0,
            running_s=86_400.0,
            throughput=rates,
            required=True,
        )
        for name in ("a", "b")
    ]
    return Problem(workers=7, tasks=tasks)


if __name__ == "__main__":
    prepare()
