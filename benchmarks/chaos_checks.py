"""The checks after a run of ``benchmarks.chaos``: every incident has a fault and is healed, no result has changed."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from benchmarks.report import Report
from cli.demo.report import TOLERANCE, compare_parameters
from cli.stack.processes import run_module
from cli.waiting import Record
from services.planner.replay.replay import verify
from shared.events.severities import Severity
from shared.events.union import ErrorDetected, NodeJoined
from shared.log.log import EventLog

RANK_FAULTS = {"kill": signal.SIGKILL, "exception": signal.SIGUSR1, "hang": signal.SIGSTOP}

FOUND_AS = {
    "kill": ("process-exit", "transition-failed"),
    "two": ("process-exit", "transition-failed"),
    # A process that has not yet installed its signal handler is killed by the signal.
    "exception": ("exception", "process-exit", "transition-failed"),
    "hang": ("hang", "transition-failed"),
    "node": ("node-lost", "transition-failed"),
}
"""Kinds of incidents that a fault may become. Faults of services, agents and the NATS server must become none."""

LONGEST_DETECTION_S = 15.0
"""For a stopped rank of a task that has just begun, the limit for first steps applies."""

SLOW_S = 8.0
"""From detection to full strength: about a second of transition, several times that on a busy machine."""

FURTHER_FAULT_S = 4.0
"""Time that a further fault during a transition may add: its detection (a second for a hang, more on a busy machine)
and another transition."""


LONGEST_STANDSTILL_S = 32.0
"""For so long a lease stands still at most before it is taken: ``lease_s``, doubled with each takeover
(``shared.log.lease``)."""

TAKEOVER = re.compile(r"^(\S+) WARNING (\w+)\S* .*: this \w+ takes over \(token \d+\)$", re.MULTILINE)
"""The line of an instance that takes the lease of its service over: when, and of which service."""


@dataclass
class Injected:
    """One fault: its kind, when it struck (Unix seconds) and where. ``targets``: workers, nodes or services."""

    number: int
    kind: str
    at: float = 0.0
    targets: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    """State and step of each task when the fault struck."""


class Checks:
    """The checks of one run; each is a bound of the report."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def expect(self, name: str, holds: bool, detail: str = "") -> None:
        """Require that a property holds; ``detail``: what is wrong, printed where it does not hold."""
        self._report.equal(name, holds, True, **({} if holds else {"detail": detail}))

    def incidents(self, incidents: list[Record], injected: list[Injected], run_dir: Path) -> None:
        """Require that every incident comes from a fault, is closed, and was healed soon; that lost nodes are found.

        Nobody misses a node that was out of use when it was killed, such as one that is isolated and not yet tested.
        """
        unexplained = [i for i in incidents if not causes(i, injected)]
        seen: dict[tuple[int, str], int] = {}
        for incident in incidents:
            line = {k: incident[k] for k in ("kind", "severity", "task", "worker", "node", "step", "response")}
            line |= {k: incident[k][11:23] if incident[k] else None for k in ("occurred_at", "detected_at")}
            line |= {
                "id": incident["id"][:8],
                "detection_s": between(incident, "occurred_at", "detected_at"),
                "resumed_s": between(incident, "detected_at", "resumed_at"),
                "restored_s": between(incident, "detected_at", "restored_at"),
                "recomputed": incident["steps_recomputed"],
                "escalations": len(incident["evidence"].get("escalations", [])),
                "faults": [f.number for f in causes(incident, injected)],
            }
            self._report.line("incident", **line)
            name = f"incident {incident['id'][:8]} ({incident['kind']} of {incident['worker'] or incident['node']})"
            self.expect(f"{name} is closed", incident["closed_at"] is not None)
            if incident["restored_at"] is not None:
                limit_s = SLOW_S + FURTHER_FAULT_S * further(incident, injected)
                self._report.at_most(f"{name} is healed (s)", line["restored_s"], limit_s)
            self.expect(f"{name} is no false alarm", incident not in unexplained, f"{incident}")
            for fault in causes(incident, injected):
                key = (fault.number, incident["worker"] or incident["node"] or "")
                seen[key] = seen.get(key, 0) + 1
        for fault in injected:
            count = seen.get((fault.number, fault.targets[0]), 0)
            if fault.kind == "node" and was_used(run_dir, fault.targets[0], fault.at):
                self.expect(f"fault {fault.number} (node {fault.targets[0]}) is found", count > 0, f"{fault}")
            if count > 1:
                self._report.line("note", what=f"{count} incidents may stem from fault {fault.number}")

    def log(self, run_dir: Path) -> None:
        """Require that the log replays, with one plan for each cause, and that no service has raised."""
        with closing(EventLog(log_url(run_dir), read_only=True)) as log:
            report = verify(log)
        self.expect("the log replays", report.ok, f"{report}")
        logs = run_dir.glob("services/*.log")
        raised = [path.name for path in logs if "Traceback" in path.read_text(errors="replace")]
        self.expect("no service raises", not raised, f"{raised}")

    def takeovers(self, run_dir: Path, injected: list[Injected], ends_at: float) -> int:
        """Require that each takeover follows an end or a suspension of an instance of the service. Return how many.

        The instance need not have been the active one: that may be another one by then. ``ends_at``: when the stack was
        asked to end (Unix seconds). The instances that it ends first give their leases to the others.
        """
        found = [each for path in run_dir.glob("services/*.log") for each in TAKEOVER.findall(path.read_text())]
        times = [(datetime.fromisoformat(when).timestamp(), when, service) for when, service in found]
        before = [each for each in times if each[0] < ends_at]
        for at, when, service in before:
            causes = [
                fault
                for fault in injected
                if fault.kind in ("service", "suspension")
                and fault.targets[0].removesuffix("-standby") == service
                and 0.0 <= at - fault.at <= LONGEST_STANDSTILL_S
            ]
            self.expect(f"the takeover of the {service} at {when} follows a fault", bool(causes))
        return len(before)

    def result(self, spec: Record, task: Record, reference: Path) -> None:
        """Require the result of a run without failures: the samples of every step, the parameters, the loss."""
        name, result = spec["name"], task["result"]
        self.expect(f"{name} succeeds", task["state"] == "succeeded", f"{task['state']}: {task['reason']}")
        if result is None:
            return
        summary = json.loads((reference / "summary.json").read_text())
        self._report.equal(f"{name}: steps", result["steps"], spec["steps"])
        self._report.equal(f"{name}: samples", result["samples_sha256"], summary["samples_sha256"])
        loss, expected = task["loss"], summary["loss"]
        self._report.at_most(f"{name}: difference of the loss", abs(loss - expected), TOLERANCE * abs(expected))
        difference = compare_parameters(Path(result["parameters_path"]), reference / "parameters.safetensors")
        self._report.at_most(f"{name}: largest difference of a parameter", difference, TOLERANCE)


def was_used(run_dir: Path, node: str, at: float) -> bool:
    """Return whether a node was in use at a time (Unix seconds): it had joined, and was not lost or isolated since."""
    with closing(EventLog(log_url(run_dir), read_only=True)) as log:
        before = [record.event for record in log.read_all() if record.recorded_at.timestamp() < at]
    joined = max(
        (i for i, event in enumerate(before) if isinstance(event, NodeJoined) and event.node == node), default=-1
    )
    return joined >= 0 and not any(
        isinstance(event, ErrorDetected) and event.severity is Severity.SEV1 and event.node == node
        for event in before[joined:]
    )


def log_url(run_dir: Path) -> str:
    """Return the URL of a run's log."""
    return f"sqlite:///{run_dir / 'log.db'}"


def further(incident: Record, injected: list[Injected]) -> int:
    """Return how many faults struck while an incident was being healed."""
    start = datetime.fromisoformat(incident["detected_at"]).timestamp()
    end = datetime.fromisoformat(incident["closed_at"] or incident["detected_at"]).timestamp()
    return sum(start < fault.at < end for fault in injected)


def causes(incident: Record, injected: list[Injected]) -> list[Injected]:
    """Return the faults that an incident may come from: of its worker or its node, not long before."""
    at = datetime.fromisoformat(incident["detected_at"]).timestamp()
    kind = incident["kind"]
    found = []
    for fault in injected:
        if kind not in FOUND_AS.get(fault.kind, ()) or not -0.5 <= at - fault.at <= LONGEST_DETECTION_S:
            continue
        if incident["worker" if fault.kind in (*RANK_FAULTS, "two") else "node"] in fault.targets:
            found.append(fault)
    return found


async def reference_of(spec: Record, directory: Path) -> Path:
    """Return the result of a run without failures; it stays for later runs with the same specification."""
    relevant = {k: v for k, v in spec.items() if k not in ("data", "env", "workers", "max_restarts", "checkpoint")}
    # The corpus is generated, always the same.
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / "unicron-chaos-references" / digest
    result = kept / "result"
    if not (result / "summary.json").exists():
        kept.mkdir(parents=True, exist_ok=True)
        path = directory / f"{spec['name']}.json"
        path.write_text(json.dumps({**relevant, "data": spec["data"]}))
        await run_module("unicron.train", "--spec", str(path), "--directory", str(kept), OMP_NUM_THREADS="1")
    return result


def between(record: Record, start: str, end: str) -> float | None:
    """Return the seconds between two fields; None if one is missing."""
    if not record[start] or not record[end]:
        return None
    seconds = (datetime.fromisoformat(record[end]) - datetime.fromisoformat(record[start])).total_seconds()
    return round(seconds, 3)
