"""A planning problem as flat arrays, tasks in the order of their names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidInput
from shared.planning import compiled
from shared.planning.kernels.arrays import Floats, Ints
from shared.plans import Problem, TaskProblem


@dataclass
class Tables:
    """Throughput tables as arrays, remembered: problems that follow from one state share their dictionaries."""

    _known: dict[int, tuple[Mapping[int, float], Ints, Floats, bytes]] = field(default_factory=dict)

    def arrays(self, table: Mapping[int, float]) -> tuple[Ints, Floats, bytes]:
        """Return counts, increasing, FLOP/s, and a digest of both. The table is kept alive: its id stays its own."""
        found = self._known.get(id(table))
        if found is None:
            counts = np.fromiter(table.keys(), np.int64, len(table))
            flop_per_s = np.fromiter(table.values(), np.float64, len(table))
            if counts.size > 1 and not bool(np.all(counts[1:] > counts[:-1])):
                order = np.argsort(counts)
                counts, flop_per_s = counts[order], flop_per_s[order]
            digest = hashlib.blake2b(counts.tobytes() + flop_per_s.tobytes(), digest_size=16).digest()
            found = self._known[id(table)] = (table, counts, flop_per_s, digest)
        return found[1:]


@dataclass(frozen=True)
class Inputs:
    """All that the solver reads of a problem, tasks by name, in the order in which ``worths.options`` takes it."""

    tasks: Sequence[TaskProblem]
    workers: int
    table_digests: bytes
    table_starts: Ints
    table_counts: Ints
    table_flop_per_s: Floats
    weight: Floats
    necessary: Ints
    limit: Ints
    current: Ints
    faulted: Ints
    required: Ints
    running_s: Floats
    transition_s: Floats
    staying: Ints
    newcomers_s: Floats
    moves_starts: Ints
    moves_counts: Ints
    moves_s: Floats

    @classmethod
    def of(cls, problem: Problem, tables: Tables | None = None) -> Inputs:
        """Return a problem's inputs. ``tables``: remembers arrays between problems that share throughput tables."""
        tables = tables or Tables()
        tasks = sorted(problem.tasks, key=lambda task: task.name)
        arrays = [tables.arrays(task.throughput) for task in tasks]
        moves = [sorted(task.transition_to_s.items()) for task in tasks]
        return cls(
            tasks,
            problem.workers,
            b"".join(digest for _, _, digest in arrays),
            _starts([counts.size for counts, _, _ in arrays]),
            np.concatenate([counts for counts, _, _ in arrays] or [np.zeros(0, np.int64)]),
            np.concatenate([flop_per_s for _, flop_per_s, _ in arrays] or [np.zeros(0, np.float64)]),
            np.array([task.weight for task in tasks], np.float64),
            np.array([task.necessary for task in tasks], np.int64),
            np.array([min(problem.workers, task.maximum) for task in tasks], np.int64),
            np.array([task.current for task in tasks], np.int64),
            np.array([task.faulted for task in tasks], np.int64),
            np.array([task.required for task in tasks], np.int64),
            np.array([task.running_s for task in tasks], np.float64),
            np.array([task.transition_s for task in tasks], np.float64),
            np.array([task.staying for task in tasks], np.int64),
            np.array([task.newcomers_s for task in tasks], np.float64),
            _starts([len(to) for to in moves]),
            np.array([count for to in moves for count, _ in to], np.int64),
            np.array([seconds for to in moves for _, seconds in to], np.float64),
        )

    @property
    def arrays(self) -> tuple[Ints | Floats, ...]:
        """Return the arrays alone."""
        return (
            self.table_starts,
            self.table_counts,
            self.table_flop_per_s,
            self.weight,
            self.necessary,
            self.limit,
            self.current,
            self.faulted,
            self.required,
            self.running_s,
            self.transition_s,
            self.staying,
            self.newcomers_s,
            self.moves_starts,
            self.moves_counts,
            self.moves_s,
        )

    def key(self) -> bytes:
        """Return a digest of everything the answer depends on: names only by their order."""
        digest = hashlib.blake2b(f"{self.workers} {len(self.tasks)}".encode(), digest_size=16)
        digest.update(self.table_digests)
        for array in self.arrays[3:]:  # all but the tables
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.tobytes())
        return digest.digest()


@dataclass(frozen=True)
class Instance:
    """The tasks, and of each its useful counts ``starts[t] .. starts[t + 1]`` with what they are worth.

    ``worth`` is G in units of ``2 ** exponent``. ``kernels``: those to solve it with.
    """

    tasks: Sequence[TaskProblem]
    workers: int
    starts: Ints
    counts: Ints
    worth: Ints
    touched: Ints
    moved: Ints
    exponent: int
    kernels: Any

    @classmethod
    def of(cls, inputs: Inputs) -> Instance:
        """Return the instance of these inputs.

        Raises:
            InvalidInput: the objective is too large for a float64.
        """
        size = inputs.table_counts.size + 2 * len(inputs.tasks)
        kernels = compiled.namespace(size * inputs.workers)
        # An overflow is refused below; compiled code does not warn of it either.
        with np.errstate(over="ignore", invalid="ignore"):
            starts, counts, objective, touched, moved = kernels.options(*inputs.arrays)
        worth, exponent = kernels.fixed_point(starts, objective)
        if exponent == kernels.TOO_LARGE:
            raise InvalidInput("the objective (weight x throughput x seconds) exceeds what a 64-bit float can hold")
        return cls(inputs.tasks, inputs.workers, starts, counts, worth, touched, moved, int(exponent), kernels)

    def chosen(self, choice: Ints) -> list[int]:
        """Return the counts of a choice (an item a task)."""
        return [int(count) for count in self.counts[choice]]

    def useful(self, task: int) -> Ints:
        """Return a task's useful counts, increasing."""
        found: Ints = self.counts[self.starts[task] : self.starts[task + 1]]
        return found

    def only(self, kept: NDArray[np.bool_]) -> Instance:
        """Return the instance with a subset of the useful counts."""
        before = np.zeros(self.counts.size + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        return replace(
            self,
            starts=before[self.starts],
            counts=self.counts[kept],
            worth=self.worth[kept],
            touched=self.touched[kept],
            moved=self.moved[kept],
        )


def _starts(sizes: Sequence[int]) -> Ints:
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
