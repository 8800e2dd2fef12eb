"""A planning problem as flat arrays: what ``solver.py`` passes to the kernels, and the look-ahead's key for it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidInput
from shared.events.plans import Problem, TaskProblem
from shared.planning import compiled
from shared.planning.kernels.arrays import Choices, Floats, Ints, TableArrays, TaskArrays, TransitionArrays


class _Remembered(NamedTuple):
    """A throughput table as arrays. ``table`` is kept alive, so that its id belongs to no other table."""

    table: Mapping[int, float]
    counts: Ints
    flop_per_s: Floats
    digest: bytes


@dataclass
class TableCache:
    """Throughput tables as arrays. Problems that follow from one planner state share their table dictionaries.

    ``most``: number of tables that are remembered, after which all are forgotten; 0: there is no limit.
    """

    most: int = 0
    _known: dict[int, _Remembered] = field(default_factory=dict)

    def arrays(self, table: Mapping[int, float]) -> tuple[Ints, Floats, bytes]:
        """Return the counts, increasing, the FLOP/s at each count, and a digest of both."""
        found = self._known.get(id(table))
        if found is None:
            counts = np.fromiter(table.keys(), np.int64, len(table))
            flop_per_s = np.fromiter(table.values(), np.float64, len(table))
            if counts.size > 1 and not bool(np.all(counts[1:] > counts[:-1])):
                order = np.argsort(counts)
                counts, flop_per_s = counts[order], flop_per_s[order]
            digest = hashlib.blake2b(counts.tobytes() + flop_per_s.tobytes(), digest_size=16).digest()
            if 0 < self.most <= len(self._known):
                self._known.clear()
            found = self._known[id(table)] = _Remembered(table, counts, flop_per_s, digest)
        return found.counts, found.flop_per_s, found.digest


@dataclass(frozen=True)
class Inputs:
    """Everything that the solver reads of a problem of one pool, tasks in the order of their names.

    ``table_digests``: digests of the tasks' throughput tables, one after another.
    """

    tasks: Sequence[TaskProblem]
    workers: int
    table_digests: bytes
    table_arrays: TableArrays
    task_arrays: TaskArrays
    transition_arrays: TransitionArrays

    @classmethod
    def of(cls, problem: Problem, cache: TableCache | None = None) -> Inputs:
        """Return the inputs of a problem. ``cache``: shared by problems that share throughput tables."""
        cache = cache or TableCache()
        tasks = sorted(problem.tasks, key=lambda task: task.name)
        tables = [cache.arrays(task.throughput) for task in tasks]
        transitions = [_transitions(task.transition_to_s) for task in tasks]
        return cls(
            tasks,
            problem.workers,
            b"".join(digest for _, _, digest in tables),
            TableArrays(
                _starts([counts.size for counts, _, _ in tables]),
                np.concatenate([counts for counts, _, _ in tables] or [np.zeros(0, np.int64)]),
                np.concatenate([flop_per_s for _, flop_per_s, _ in tables] or [np.zeros(0, np.float64)]),
            ),
            TaskArrays(
                weight=np.array([task.weight for task in tasks], np.float64),
                necessary=np.array([task.necessary for task in tasks], np.int64),
                limit=np.array([min(problem.workers, task.maximum) for task in tasks], np.int64),
                current=np.array([task.current for task in tasks], np.int64),
                faulted=np.array([task.faulted for task in tasks], np.int64),
                required=np.array([task.required for task in tasks], np.int64),
                running_s=np.array([task.running_s for task in tasks], np.float64),
                transition_s=np.array([task.transition_s for task in tasks], np.float64),
                staying=np.array([task.staying for task in tasks], np.int64),
                newcomers_s=np.array([task.newcomers_s for task in tasks], np.float64),
                slowdown=np.array([task.slowdown for task in tasks], np.float64),
                worker_cost_flop_per_s=np.array([task.worker_cost_flop_per_s for task in tasks], np.float64),
            ),
            TransitionArrays(
                _starts([counts.size for counts, _ in transitions]),
                np.concatenate([counts for counts, _ in transitions] or [np.zeros(0, np.int64)]),
                np.concatenate([seconds for _, seconds in transitions] or [np.zeros(0, np.float64)]),
            ),
        )

    def key(self) -> bytes:
        """Return a digest of everything the answer depends on. Names count only by their order."""
        digest = hashlib.blake2b(f"{self.workers} {len(self.tasks)}".encode(), digest_size=16)
        digest.update(self.table_digests)
        for array in (*self.task_arrays, *self.transition_arrays):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.tobytes())
        return digest.digest()


@dataclass(frozen=True)
class Instance:
    """The tasks with their useful counts. Values are in units of ``2 ** exponent`` weighted FLOP.

    ``kernels``: the functions of ``shared.planning.kernels`` that solve the instance, plain or compiled.
    """

    tasks: Sequence[TaskProblem]
    workers: int
    choices: Choices
    exponent: int
    kernels: Any

    @classmethod
    def of(cls, inputs: Inputs) -> Instance:
        """Return the instance of these inputs.

        Raises:
            InvalidInput: the objective is too large for a float64.
        """
        size = inputs.table_arrays.counts.size + 2 * len(inputs.tasks)
        kernels = compiled.namespace(size * inputs.workers)
        # Plain Python would warn of the overflow that is refused below; compiled code does not.
        with np.errstate(over="ignore", invalid="ignore"):
            found = kernels.options(inputs.table_arrays, inputs.task_arrays, inputs.transition_arrays)
        value, exponent = kernels.fixed_point(found.starts, found.objective)
        if exponent == kernels.TOO_LARGE:
            raise InvalidInput("the objective (weight x throughput x seconds) exceeds what a 64-bit float can hold")
        choices = Choices(found.starts, found.counts, value, found.touched, found.moved)
        return cls(inputs.tasks, inputs.workers, choices, int(exponent), kernels)

    def chosen(self, choice: Ints) -> list[int]:
        """Return the counts of a choice of one item for each task."""
        return [int(count) for count in self.choices.counts[choice]]

    def useful(self, task: int) -> Ints:
        """Return the useful counts of a task, increasing."""
        found: Ints = self.choices.counts[self.choices.starts[task] : self.choices.starts[task + 1]]
        return found

    def only(self, kept: NDArray[np.bool_]) -> Instance:
        """Return the instance with the useful counts for which ``kept`` is true."""
        before = np.zeros(self.choices.counts.size + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        choices = Choices(
            before[self.choices.starts],
            self.choices.counts[kept],
            self.choices.value[kept],
            self.choices.touched[kept],
            self.choices.moved[kept],
        )
        return replace(self, choices=choices)


def _transitions(to_s: Mapping[int, float]) -> tuple[Ints, Floats]:
    """Return the counts that have a transition time of their own, increasing, and these times."""
    counts, seconds = np.fromiter(to_s.keys(), np.int64, len(to_s)), np.fromiter(to_s.values(), np.float64, len(to_s))
    if counts.size < 2:
        return counts, seconds
    order = np.argsort(counts)
    return counts[order], seconds[order]


def _starts(sizes: Sequence[int]) -> Ints:
    """Return where the entries of each task begin, given how many each task has."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
