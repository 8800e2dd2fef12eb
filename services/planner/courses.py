"""Courses: what a pool of workers goes through in a future (``futures.py``), and what a candidate is worth in it.

On the way, the cluster has one of few sets of counts: those before the event, those of a candidate, those that are best
with fewer nodes. After each loss and return it takes the set that fits the workers left and is best by the one-step
objective, F * D_running - costs of the transition (the *base policy* of the rollout algorithm: Bertsekas, Tsitsiklis
and Wu, "Rollout algorithms for combinatorial optimization", Journal of Heuristics 3, 1997). Each changed task pays
F * D_transition as in the objective. A lost node hits tasks as likely as they are spread over nodes, or nobody, if it
is a free one; a task that is hit and keeps its count pays for newcomers.

A task whose remaining work ends before the next failure is expected ends within the future, after its D_running: from
then on it achieves nothing, has no workers, and no loss or move costs it anything. A *phase* is the time between two
ends of tasks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from services.planner.futures import Future, Prospect
from shared.planning.performance.ordered_sum import ordered_sum
from shared.plans import Problem, Solution, TaskProblem

Counts = tuple[int, ...]
"""Workers of each task of a pool, in the order of the pool's tasks."""

ENDLESS_S = float("inf")
"""End of a task that outlasts all futures."""


class Course:
    """The sets of counts that a pool may have, what each achieves, and what it costs to change between them.

    Args:
        pool: the problem of the pool.
        known: what its futures are drawn from.
        running_s: D_running of the pool.
        solutions: the candidates.
        fewer: the answers for fewer nodes.
    """

    def __init__(
        self, pool: Problem, known: Prospect, running_s: float, solutions: Sequence[Solution], fewer: Sequence[Solution]
    ) -> None:
        # By their ends, so that the tasks of a phase are the last ones.
        tasks = [(task.running_s if task.running_s < running_s else ENDLESS_S, task.name, task) for task in pool.tasks]
        ordered = sorted(tasks, key=lambda each: each[:2])
        self._tasks = [task for _, _, task in ordered]
        self._ends_s = [end_s for end_s, _, _ in ordered]
        self._workers, self._known, self._running_s = pool.workers, known, running_s
        self._sets: list[Counts] = []
        self._numbers: dict[Counts, int] = {}
        names = [task.name for task in self._tasks]
        mine = [tuple(each.assignment[name] for name in names) for each in solutions]
        self.candidates = [self._add(counts) for counts in mine]
        """The set of each solution, by its number."""
        for each in fewer:
            self._add(tuple(each.assignment[name] for name in names))
        self._add(tuple(task.current for task in self._tasks))
        self._nothing = self._add((0,) * len(names))
        terms = [{term.name: term.penalty for term in each.terms} for each in solutions]
        self._first = {
            counts: ordered_sum(penalties[name] for name in names)
            for counts, penalties in zip(self.candidates, terms, strict=True)
        }
        self._full = [
            [_full_flop_per_s(task, count) for task, count in zip(self._tasks, counts, strict=True)]
            for counts in self._sets
        ]
        self._rates = [self._net_rates(i) for i in range(len(self._sets))]
        self._waf: dict[tuple[int, int], float] = {}
        self._used: dict[tuple[int, int], int] = {}
        self._costs: dict[tuple[int, int, bool, int], float] = {}
        self._next: dict[tuple[int, int, bool, int], int] = {}

    def value(self, first: int, what: Future) -> float:
        """Return what a candidate is worth in a future, weighted FLOP."""
        now, workers, at_s, phase = first, self._workers, 0.0, 0
        total = -self._first[first]
        for step in what.steps:
            total += self._earned(now, at_s, step.at_s)
            at_s = step.at_s
            phase = bisect_right(self._ends_s, at_s)
            # The lost node is one of those that are in use, or a free one.
            hit = step.workers < 0 and step.place * workers < self._used_in(now, phase)
            workers += step.workers
            key = now, workers, hit, phase
            then = self._next.get(key)
            if then is None:
                then = self._next[key] = self._response(*key)
            total -= self._cost(now, then, hit, phase)
            now = then
        return total + self._earned(now, at_s, self._known.horizon_s)

    def _add(self, counts: Counts) -> int:
        """Return the number of a set of counts."""
        number = self._numbers.setdefault(counts, len(self._sets))
        if number == len(self._sets):
            self._sets.append(counts)
        return number

    def _net_rates(self, number: int) -> list[float]:
        """Return F of each task, less what its workers cost."""
        return [
            full / task.slowdown - count * task.worker_cost_flop_per_s
            for full, task, count in zip(self._full[number], self._tasks, self._sets[number], strict=True)
        ]

    def _earned(self, number: int, since_s: float, until_s: float) -> float:
        """Return what a set achieves in a part of the future, phase by phase."""
        total = 0.0
        for phase in range(bisect_right(self._ends_s, since_s), len(self._ends_s)):
            end_s = min(until_s, self._ends_s[phase])
            total += self._waf_in(number, phase) * (end_s - since_s)
            since_s = end_s
            if end_s >= until_s:
                break
        return total

    def _waf_in(self, number: int, phase: int) -> float:
        """Return F of the tasks that a phase has, less what their workers cost."""
        found = self._waf.get((number, phase))
        if found is None:
            found = self._waf[number, phase] = ordered_sum(self._rates[number][phase:])
        return found

    def _used_in(self, number: int, phase: int) -> int:
        """Return the workers in use by a set in a phase."""
        found = self._used.get((number, phase))
        if found is None:
            found = self._used[number, phase] = sum(self._sets[number][phase:])
        return found

    def _response(self, now: int, workers: int, hit: bool, phase: int) -> int:
        """Return the set that the base policy takes once this many workers are left; staying wins ties."""
        best, most = self._nothing, 0.0
        fitting = [i for i in range(len(self._sets)) if self._used_in(i, phase) <= workers]
        for i in sorted(fitting, key=lambda i: i != now):
            if i == self._nothing and len(fitting) > 1:
                continue
            value = self._objective(i, phase) - self._cost(now, i, hit, phase)
            if best == self._nothing or value > most:
                best, most = i, value
        return best

    def _objective(self, number: int, phase: int) -> float:
        """Return F * D_running of a set; of a task that ends sooner, until its end from the begin of the phase on."""
        begin_s = self._ends_s[phase - 1] if phase else 0.0
        return self._earned(number, begin_s, begin_s + self._running_s)

    def _cost(self, now: int, then: int, hit: bool, phase: int) -> float:
        """Return what a change costs, weighted FLOP. ``hit``: a node in use was lost."""
        key = now, then, hit, phase
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._priced(*key)
        return found

    def _priced(self, now: int, then: int, hit: bool, phase: int) -> float:
        size = self._known.node_workers
        nodes = -(-self._used_in(now, phase) // size)
        total = 0.0
        before_, after_, full = self._sets[now], self._sets[then], self._full[now]
        for i in range(phase, len(self._tasks)):
            task, before, after = self._tasks[i], before_[i], after_[i]
            if before != after:
                seconds = task.transition_to_s.get(after)
                if seconds is None:
                    seconds = task.transition_s + (task.newcomers_s if after > before else 0.0)
                total += full[i] * seconds
            elif hit and before:
                likely = min(1.0, -(-before // size) / nodes)
                total += likely * full[i] * (task.transition_s + task.newcomers_s)
        return total


def _full_flop_per_s(task: TaskProblem, workers: int) -> float:
    """Return F without slow workers; counts between useful ones do not occur."""
    return task.weight * task.throughput.get(workers, 0.0) if workers >= max(1, task.necessary) else 0.0
