"""What is unusual of a task that trains: slow workers and open anomalies, in words."""

from __future__ import annotations

from typing import Any


def notable(task: dict[str, Any]) -> list[str]:
    """Return a line for each slow worker and each open anomaly of a task, as the api answers it."""
    slow = [
        f"{worker} is {by:.3g}x slower than its peers (unicron postmortem {worker})"
        for worker, by in task["slow_workers"].items()
    ]
    return slow + [_words(anomaly) for anomaly in task["anomalies"]]


def _words(anomaly: dict[str, Any]) -> str:
    between = f" between {anomaly['node']} and {anomaly['peer']}" if anomaly["peer"] else ""
    number = f"{anomaly['value']:.4g} instead of {anomaly['expected']:.4g}"
    unit = f" ({anomaly['unit']})" if anomaly["unit"] else ""
    return f"{anomaly['kind']}{between} since step {anomaly['step']}: {number}{unit}"
