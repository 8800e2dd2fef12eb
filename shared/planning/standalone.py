"""A planning problem by itself, without a cluster: its JSON form, its limits, and its answer.

``unicron plan solve`` and ``POST /v1/plan/solve`` use it.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from pydantic import Field, ValidationError

from shared.errors import InvalidInput
from shared.events.plans import Problem, TaskProblem, Term
from shared.field_problems import MISSING, problem_of, sentence
from shared.model import Model
from shared.planning.solver import solve_with_proof
from shared.planning.waf import waf_flop_per_s
from shared.unknown_names import unknown_field_of

MAX_PROBLEM_BYTES = 64 * 2**20
"""Largest text of a problem. 100,000 workers x 256 tasks with 1,500 counts each, at 40 bytes a count, is a quarter of
this."""

MAX_WORKERS = 1_000_000
"""Most workers: ten times the largest cluster that the planner is built for. The search takes 50 bytes of memory for
each worker."""

MAX_TASKS = 4096
"""Most tasks: sixteen times the number with which the solver is measured."""

MAX_SECONDS = 1e10
"""Longest time: three hundred years, longer than any expected time to a failure."""

MAX_WEIGHT = 1e12
"""Largest weight. Weights are relative: objective values that differ by more than 10**15 leave nothing of the smaller
one in a sum."""

MAX_FLOP_PER_S = 1e30
"""Largest throughput: a million times a million of the fastest accelerators."""

MAX_REPORTED = 20
"""Most wrong fields that are reported at once. A table of thousands of entries may be wrong throughout."""

Workers = Annotated[int, Field(ge=0, le=MAX_WORKERS)]
Count = Annotated[int, Field(ge=1, le=MAX_WORKERS)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
FlopPerS = Annotated[float, Field(ge=0, le=MAX_FLOP_PER_S)]


class StandaloneTask(Model):
    """A task of the problem.

    ``weight``: w, its priority. ``necessary``: least workers at which it counts. ``current``: workers before the fault.
    ``faulted``: whether it has lost one. ``transition_s``: D_transition, seconds; or a map from the new count to
    seconds, where absent counts have 0. ``newcomers_s``: seconds added for each count above ``staying``, the workers
    that have the state and stay; not for counts that the map names. ``throughput``: T, achieved aggregate FLOP/s by
    worker count; absent counts have 0.
    """

    name: str = Field(min_length=1, max_length=128)
    weight: float = Field(ge=0, le=MAX_WEIGHT)
    necessary: Workers
    current: Workers
    faulted: bool = False
    transition_s: Seconds | dict[Workers, Seconds]
    staying: Workers = 0
    newcomers_s: Seconds = 0.0
    throughput: dict[Count, FlopPerS]


class StandaloneProblem(Model):
    """The problem. ``workers``: n', the number of workers that are left. ``running_s``: D_running(n'), seconds.

    ``workers_per_node`` describes how counts could be placed; G does not depend on it.
    """

    workers: Workers
    workers_per_node: int = Field(default=8, ge=1, le=1024)
    running_s: Seconds
    tasks: list[StandaloneTask] = Field(min_length=1, max_length=MAX_TASKS)

    def planning_problem(self) -> Problem:
        """Return the problem as the planner poses it. A task that achieves nothing at any count gets no worker."""
        return Problem(workers=self.workers, tasks=[self._task(task) for task in self.tasks])

    def _task(self, task: StandaloneTask) -> TaskProblem:
        by_count = task.transition_s if isinstance(task.transition_s, dict) else {}
        # Built without validation: a table can be large, and all values have been validated.
        found = TaskProblem.model_construct(
            name=task.name,
            weight=task.weight,
            necessary=task.necessary,
            maximum=self.workers,
            current=task.current,
            faulted=task.faulted,
            transition_s=0.0 if isinstance(task.transition_s, dict) else task.transition_s,
            transition_to_s=by_count,
            staying=task.staying,
            newcomers_s=task.newcomers_s,
            running_s=self.running_s,
            throughput=task.throughput,
            required=False,
        )
        hopeless = not any(waf_flop_per_s(found, count) > 0.0 for count in task.throughput if count <= self.workers)
        return found.model_copy(update={"maximum": 0}) if hopeless else found


class StandaloneTerm(Term):
    """A task's part of the objective, and why it gets no worker if it gets none."""

    reason: str = ""


class StandaloneAnswer(Model):
    """The best assignment. ``objective``, ``bound``: weighted FLOP; they are equal, which proves that it is the best.

    ``relaxation``: the bound before the search. ``price``: value of one more worker at that bound. ``solve_s``: seconds
    of the solver, without reading the problem.
    """

    assignment: dict[str, int]
    objective: float
    bound: float
    relaxation: float
    price: float
    terms: list[StandaloneTerm]
    solve_s: float


def solve_standalone(problem: StandaloneProblem) -> StandaloneAnswer:
    """Return the assignment x' that maximises the sum of G(t, x'_t) over at most ``workers`` workers.

    G(t, x') = F(t, x') * running_s - [x' != current or faulted] * F(t, current) * transition_s(x'), in weighted FLOP,
    with F(t, x) = weight * throughput[x] from ``necessary`` workers on and else 0 (Unicron, sections 3 and 5), and
    ``newcomers_s`` with transition_s(x') where x' is more than ``staying``.

    Raises:
        InvalidInput: the objective is too large for a float64.
    """
    began = time.perf_counter()
    posed = problem.planning_problem()
    solution, proof = solve_with_proof(posed)
    solve_s = time.perf_counter() - began
    tasks = {task.name: task for task in posed.tasks}
    return StandaloneAnswer(
        assignment=solution.assignment,
        objective=solution.objective,
        bound=proof.bound,
        relaxation=proof.relaxation,
        price=proof.price,
        terms=[
            StandaloneTerm(**term.model_dump(), reason=_reason(tasks[term.name], term.workers, problem.workers))
            for term in solution.terms
        ],
        solve_s=solve_s,
    )


def _reason(task: TaskProblem, given: int, workers: int) -> str:
    """Return why the task gets no worker; empty if it gets some."""
    if given > 0:
        return ""
    if not task.throughput:
        return "its throughput table is empty"
    working = [count for count in task.throughput if waf_flop_per_s(task, count) > 0.0]
    if not working:
        least = f" of at least {task.necessary} workers, its necessary count," if task.necessary > 1 else ""
        return f"no count{least} in its throughput table achieves anything"
    if min(working) > workers:
        return f"needs at least {min(working)} workers; there are {workers}"
    return f"needs at least {min(working)} workers; other tasks make more of them"


def parse_problem(text: bytes) -> StandaloneProblem:
    """Return the problem in JSON text.

    Raises: InvalidInput: the text is too large or not JSON, or fields are wrong; then there is one entry for each wrong
    field, with its name, its value, and what is allowed.
    """
    check_size(len(text))
    try:
        problem = StandaloneProblem.model_validate_json(text)
    except ValidationError as err:
        wrong = [item for item in err.errors(include_url=False) if not _of_another_form(item)]
        raise _refused([_entry(item) for item in wrong[:MAX_REPORTED]]) from err
    seen: set[str] = set()
    for i, task in enumerate(problem.tasks):
        if task.name in seen:
            raise _refused([{"field": f"tasks.{i}.name", "value": task.name, "problem": "must differ from all others"}])
        seen.add(task.name)
    return problem


def check_size(size_bytes: int) -> None:
    """Refuse a problem that is too large to be read.

    Raises:
        InvalidInput: the problem is too large.
    """
    if size_bytes > MAX_PROBLEM_BYTES:
        problem = f"larger than {MAX_PROBLEM_BYTES} bytes, the most that is read"
        raise InvalidInput.of("(problem)", size_bytes, problem, f"planning problem refused: {problem}")


def _of_another_form(item: Any) -> bool:
    """Return whether the error says that a number is no map, or a map no number, where both are allowed."""
    if "transition_s" not in item["loc"]:
        return False
    is_map = isinstance(item["input"], dict)
    return bool(item["type"] == ("float_type" if is_map else "dict_type"))


def _entry(item: Any) -> dict[str, Any]:
    """Return one validation error as field, value and problem."""
    # Pydantic's location has the name of a union's branch, which is no field, and "[key]" after the key of a map.
    parts = [str(part) for part in item["loc"] if not str(part).startswith(("constrained-", "dict[", "float", "[key]"))]
    value: Any = item["input"] if isinstance(item["input"], str | int | bool | None) else "..."
    if isinstance(item["input"], float):
        value = item["input"] if item["input"] - item["input"] == 0.0 else str(item["input"])
    unknown = item["type"] == "extra_forbidden"
    problem = unknown_field_of(StandaloneProblem, item["loc"]) if unknown else problem_of(item)
    if item["type"] == "json_invalid" or problem == MISSING:
        value = None
    return {"field": ".".join(parts) or "(problem)", "value": value, "problem": problem}


def _refused(errors: list[dict[str, Any]]) -> InvalidInput:
    text = "; ".join(sentence(e["field"], e["problem"], _short(e["value"])) for e in errors)
    return InvalidInput(f"planning problem refused: {text}", errors)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
