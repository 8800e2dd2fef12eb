"""The rate of a task at a number of workers: the throughput model, corrected by a robust mean of measurements. Pure.

A single measurement is noise: the first steps after a start, or a busy machine, are off by factors. The median of the
newest measurements, each over the model's value for its count of workers, is not, as long as most measurements are
sound.
"""

from __future__ import annotations

from statistics import median

from shared.events.union import PlanDecided
from shared.views.documents import SHORTEST_STEP_S, TaskView
from shared.views.task_parts import RateSample

_SAMPLES = 15
"""Number of measurements over which the mean is taken. Chosen: seven wrong ones do not move it beyond the sound ones,
and a lasting change of the rate shows after eight."""


def with_sample(task: TaskView, workers: int, step_s: float) -> list[RateSample]:
    """Return the task's newest samples with one more; a sample of an impossible step time is left out."""
    if step_s < SHORTEST_STEP_S or workers < 1:
        return task.rates
    return [*task.rates, RateSample(workers=workers, flop_per_s=task.update_flop / step_s)][-_SAMPLES:]


def modelled_rates(task: TaskView, event: PlanDecided, count: int) -> dict[int, float]:
    """Return the task's modelled FLOP/s by count, with that of ``count`` if the plan has chosen it.

    The plan's throughput is the model times the planner's correction, which is taken out again.
    """
    problem, solution = event.problem, event.solution
    posed = next((p for p in problem.tasks if p.name == task.name), None) if problem is not None else None
    if posed is None:
        return task.modelled
    rate = posed.throughput.get(count, 0.0)
    if posed.table and solution is not None:
        # The problem names its table by digest; the term of the chosen count has the weighted rate there.
        chosen = next((t for t in solution.terms if (t.name, t.workers) == (task.name, count)), None)
        rate = chosen.waf_flop_per_s / posed.weight if chosen is not None else 0.0
    return {**task.modelled, count: rate / posed.correction} if rate > 0.0 else task.modelled


def rate_flop_per_s(task: TaskView, workers: int) -> float:
    """Return the FLOP/s of ``workers`` workers; 0 until a step was measured.

    If the model's value of the count is not known, this is the median of what was measured there; if nothing was, that
    of all samples, in proportion to the workers.
    """
    if workers < 1 or not task.rates:
        return 0.0
    modelled = task.modelled.get(workers, 0.0)
    ratios = [s.flop_per_s / task.modelled[s.workers] for s in task.rates if s.workers in task.modelled]
    if modelled and ratios:
        return modelled * median(ratios)
    same = [sample.flop_per_s for sample in task.rates if sample.workers == workers]
    return median(same) if same else workers * median(s.flop_per_s / s.workers for s in task.rates)
