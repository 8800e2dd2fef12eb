"""Runs of several policies with several seeds, over processes. The order of the outcomes is that of the request."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shared.errors import Conflict, InvalidInput
from shared.log.log import EventLog
from shared.planning import compiled
from simulator.oracle import oracle
from simulator.outcome import Outcome
from simulator.policies import POLICIES
from simulator.policy import Policy
from simulator.report.summary import ORACLE
from simulator.run.engine import simulate
from simulator.run.measured_times import on_cluster
from simulator.workloads.workload import Workload

WorkloadOf = Callable[[int], Workload]
"""Returns the workload of a seed; can be pickled."""

_PROGRESS_EVERY_S = 0.2
"""How often progress is asked for: as often as a person sees a bar move."""


@dataclass(frozen=True)
class Fixed:
    """One workload for all seeds: a trace that is not drawn."""

    workload: Workload

    def __call__(self, seed: int) -> Workload:
        """Return the workload."""
        return self.workload


@dataclass(frozen=True)
class Run:
    """One run to make.

    Attributes:
        workload_of: gives the workload of the seed.
        policy: name in the registry, or the oracle's.
        seed: of the trace, and of what the run draws.
        parameters: fields of ``cluster.configured`` in place of the policy's.
        efficiency: of a healthy step, in place of the policy's; None: as it is.
        log: file for the events; none is written where it is None.
        costs: whether worker-seconds are accounted for.
    """

    workload_of: WorkloadOf
    policy: str
    seed: int
    parameters: Mapping[str, float] = field(default_factory=dict)
    efficiency: float | None = None
    log: Path | None = None
    costs: bool = True

    def changed(self, policy: Policy) -> Policy:
        """Return the policy with the changes of this run."""
        efficiency = policy.efficiency if self.efficiency is None else self.efficiency
        return replace(policy, parameters={**policy.parameters, **self.parameters}, efficiency=efficiency)


def make(run: Run, progress: Callable[[float], None] = lambda share: None) -> Outcome:
    """Make one run. ``progress``: called with the share of it that is done.

    Raises:
        InvalidInput: there is no such policy, or its workload is wrong.
        Conflict: the file of the log exists.
    """
    workload = run.workload_of(run.seed)
    if run.policy == ORACLE:
        return oracle(workload).model_copy(update={"seed": run.seed})
    policy = run.changed(on_cluster(POLICIES[checked_policy(run.policy)], workload.times))
    horizon_s = workload.trace.horizon_s

    def at(simulated_s: float) -> None:
        progress(simulated_s / horizon_s if horizon_s else 1.0)

    if run.log is None:
        return simulate(workload, policy, run.seed, costs=run.costs, progress=at)
    with closing(_new_log(run.log)) as log:
        return simulate(workload, policy, run.seed, log=log, costs=run.costs, progress=at)


def checked_policy(name: str) -> str:
    """Return the name of a policy, or of the oracle.

    Raises:
        InvalidInput: there is none of that name.
    """
    if name != ORACLE and name not in POLICIES:
        raise InvalidInput(f"policy: {name!r}; allowed are all, {', '.join([*POLICIES, ORACLE])}")
    return name


def _new_log(path: Path) -> EventLog:
    """Return an empty log in a new file."""
    if path.exists():
        raise Conflict(f"{path} exists; a simulation writes new logs only")
    path.parent.mkdir(parents=True, exist_ok=True)
    return EventLog(f"sqlite:///{path.resolve()}")


def make_all(
    runs: Sequence[Run], jobs: int = 1, progress: Callable[[float], None] = lambda share: None
) -> list[Outcome]:
    """Make all runs and return their outcomes in the order of the runs. The number of jobs changes none of them.

    Args:
        runs: what to make.
        jobs: number of processes; with 1, all is done in this one.
        progress: called from time to time with the share of all runs that is done.

    Raises:
        UnicronError: as the first run that failed; no further one is begun.
    """
    if min(jobs, len(runs)) <= 1:
        return [
            make(run, lambda share, done=number: progress((done + share) / len(runs)))  # type: ignore[misc]
            for number, run in enumerate(runs)
        ]
    # Forking would copy the locks of a caller's threads.
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(runs), lock=False)  # one writer for each number
    pool = ProcessPoolExecutor(min(jobs, len(runs)), mp_context=context, initializer=_begin, initargs=(shares,))
    with pool:
        made = [pool.submit(_numbered, number, run) for number, run in enumerate(runs)]
        try:
            _watch(made, lambda: progress(sum(shares) / len(runs)))
            return [each.result() for each in made]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _watch(made: Sequence[Future[Outcome]], progress: Callable[[], None]) -> None:
    """Wait until all runs are made or one has failed."""
    waiting: set[Future[Outcome]] = set(made)
    while waiting:
        done, waiting = wait(waiting, timeout=_PROGRESS_EVERY_S, return_when=FIRST_EXCEPTION)
        progress()
        if any(each.exception() is not None for each in done):
            return


_shares: list[Any] = []
"""In a process of the pool: the array of the shares of all runs."""


def _begin(shares: Any) -> None:
    _shares[:] = [shares]
    compiled.load()  # a run with slow workers solves thousands of problems, of which each may be small


def _numbered(number: int, run: Run) -> Outcome:
    (shares,) = _shares

    def at(share: float) -> None:
        shares[number] = share

    outcome = make(run, at)
    at(1.0)
    return outcome
