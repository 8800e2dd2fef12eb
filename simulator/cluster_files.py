"""Files of a user: the cluster that is simulated, and the tasks that it runs.

A cluster file is YAML, every field optional:

    hardware: a800-80          # a profile of the throughput model (shared/planning/performance/hardware.json)
    workers_per_node: 8
    nodes: 16                  # how many, or a list of their names; at least those of the trace
    settings:                  # parameters of decisions, as in cluster.configured
      mtbf_node_s: 864000
    times:                     # of the live planner's policy, as measured; names: simulator/run/measured_times.py
      process_start_s: 12.5
    throughput:                # measured over modelled, by task
      gpt-large: 0.93

A task file has task specifications as ``unicron submit`` takes them: one YAML document for each, or a list of them.
``data`` may be left out, since nothing is read, and ``steps``, for a task that outlasts the trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from shared.errors import InvalidInput, NotFound
from shared.model import Model
from shared.names import Name
from shared.planning.performance import names
from shared.tasks.specification import MAX_SPEC_BYTES, TaskSpec, parse_spec
from shared.unknown_names import unknown_field, unknown_field_of
from simulator.run.measured_times import TIMES
from simulator.workloads.generators import MAX_NODES
from simulator.workloads.paper_tasks import DATA, MOST_STEPS
from simulator.workloads.workload import PARAMETERS

MAX_TIME_S = 365 * 86_400.0
"""A year: longer than anything that a cluster takes."""


class ClusterFile(Model):
    """What a cluster file says; None: nothing of it.

    ``hardware``: kind of all workers. ``nodes``: how many, or their names. ``settings``: parameters of decisions that
    differ. ``times``: seconds that were measured (``measured_times.TIMES``). ``throughput``: measured over modelled, by
    task.
    """

    hardware: str | None = None
    workers_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | Annotated[list[Name], Field(min_length=1)] | None = None
    settings: dict[str, float] = Field(default_factory=dict)
    times: dict[str, Annotated[float, Field(ge=0, le=MAX_TIME_S)]] = Field(default_factory=dict)
    throughput: dict[Name, Annotated[float, Field(gt=0, le=1e6)]] = Field(default_factory=dict)


def read_cluster(path: Path) -> ClusterFile:
    """Return the cluster in a file.

    Raises:
        NotFound: no such file.
        InvalidInput: not YAML, or with an entry for each wrong field: its name, its value and what is allowed.
    """
    documents = [document for document in _yaml(path) if document is not None] or [{}]
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InvalidInput(f"{path}: a cluster file is one mapping of fields")
    try:
        found = ClusterFile.model_validate(documents[0])
    except ValidationError as err:
        raise _refused(path, [_problem(item) for item in err.errors(include_url=False)]) from err
    if problems := list(_problems(found)):
        raise _refused(path, problems)
    return found


def read_tasks(path: Path) -> tuple[TaskSpec, ...]:
    """Return the tasks in a file, in its order.

    Raises:
        NotFound: no such file.
        InvalidInput: not YAML, no task, two of the same name, or a wrong specification
        (``shared.tasks.specification.parse_spec``).
    """
    entries = [entry for part in _yaml(path) for entry in (part if isinstance(part, list) else [part])]
    entries = [entry for entry in entries if entry is not None]
    if not entries:
        raise InvalidInput(f"{path}: no task; a task file has at least one specification")
    tasks: dict[str, TaskSpec] = {}
    for number, entry in enumerate(entries, start=1):
        given = {"data": DATA, "steps": MOST_STEPS, **entry} if isinstance(entry, dict) else entry
        try:
            spec = parse_spec(given)
        except InvalidInput as err:
            raise InvalidInput(f"{path}: task {number}: {err.detail}", err.extra["errors"]) from err
        if spec.name in tasks:
            raise _refused(path, [("name", spec.name, "two tasks have it; each needs a name of its own")])
        tasks[spec.name] = spec
    return tuple(tasks.values())


def _yaml(path: Path) -> list[Any]:
    """Return the documents in a file."""
    try:
        if path.stat().st_size > MAX_SPEC_BYTES:
            raise InvalidInput(f"{path}: {path.stat().st_size} bytes; at most {MAX_SPEC_BYTES} are allowed")
        return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except FileNotFoundError as err:
        raise NotFound(f"no file {path}") from err
    except (OSError, UnicodeDecodeError) as err:
        raise InvalidInput(f"{path}: cannot be read as text: {err}") from err
    except yaml.YAMLError as err:
        raise InvalidInput(f"{path}: not YAML: {err}") from err


def _problems(cluster: ClusterFile) -> list[tuple[str, object, str]]:
    """Return field, value and problem of what no cluster can have."""
    found: list[tuple[str, object, str]] = []
    if cluster.hardware is not None and cluster.hardware not in names():
        found.append(("hardware", cluster.hardware, f"must be one of {', '.join(names())}"))
    for name, value in cluster.settings.items():
        if name not in PARAMETERS:
            found.append((f"settings.{name}", value, unknown_field(name, sorted(PARAMETERS))))
        elif value < 0:
            found.append((f"settings.{name}", value, "must be at least 0"))
    for name, value in cluster.times.items():
        if name not in TIMES:
            found.append((f"times.{name}", value, unknown_field(name, [*TIMES])))
    if isinstance(cluster.nodes, list) and len(set(cluster.nodes)) < len(cluster.nodes):
        found.append(("nodes", len(cluster.nodes), "a name is there twice; each node needs one of its own"))
    return found


def _problem(item: Any) -> tuple[str, object, str]:
    """Return field, value and problem of an error of the model."""
    field = ".".join(str(part) for part in item["loc"] if part != "constrained-int")
    unknown = item["type"] == "extra_forbidden"
    problem = unknown_field_of(ClusterFile, item["loc"]) if unknown else item["msg"]
    return field, item["input"], problem


def _refused(path: Path, problems: list[tuple[str, object, str]]) -> InvalidInput:
    shown = [(field, value if isinstance(value, str | int | float) else "...", text) for field, value, text in problems]
    text = "; ".join(f"{field}: {problem} (given: {value!r})" for field, value, problem in shown)
    errors = [{"field": field, "value": value, "problem": problem} for field, value, problem in shown]
    return InvalidInput(f"{path}: {text}", errors)
