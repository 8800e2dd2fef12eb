"""Metrics of a process in Prometheus's format: what all services and agents have, and how a part adds its own.

A process has one registry (``shared.service.frame.Context.registry``). Most values are taken from the process's state
when they are asked for (``Collector``): nothing is sampled, and no decision depends on a metric. Histograms and
counters of what happens are observed where it happens. Names follow https://prometheus.io/docs/practices/naming/:
``unicron_``, and the unit at the end. A label has a value for each thing that is present, or each member of an
enumeration, so that the number of series is bounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.bus.dropped import REASONS

Samples = Mapping[Any, float]
"""Values of the labels, as a tuple -> value. (The type of a mapping's keys is invariant: tuples differ in length.)"""


def gauge(name: str, text: str, value: float | Samples, *labels: str) -> GaugeMetricFamily:
    """Return the values at this moment of something that goes up and down.

    Args:
        name: with the unit at its end.
        text: what it is, for the reader of the page.
        value: the value; or with ``labels`` that of each combination.
        labels: names of the labels.
    """
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, number in _samples(value).items():
        family.add_metric(key, number)
    return family


def counter(name: str, text: str, value: float | Samples, *labels: str) -> CounterMetricFamily:
    """Return the values of something that is counted since the start of the process; arguments as for ``gauge``."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, number in _samples(value).items():
        family.add_metric(key, number)
    return family


def _samples(value: float | Samples) -> Samples:
    return value if isinstance(value, Mapping) else {(): value}


class StateMetrics(Collector):
    """Metrics that are read from a process's state whenever they are asked for.

    ``describe`` names none, so that registering them reads nothing; ``collect`` runs on the event loop
    (``shared.service.metrics_server``), where that state changes.

    Args:
        read: returns the metrics.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering reads nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this moment."""
        return self._read()


def new_registry() -> CollectorRegistry:
    """Return a registry with what the kernel knows about this process (``process_*``)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


@functools.cache
def version() -> str:
    """Return the version of the program; ``unknown`` where it runs without being installed."""
    try:
        return metadata.version("unicron-cluster")
    except metadata.PackageNotFoundError:
        return "unknown"


def dropped(counters: Mapping[str, int], service: str) -> Iterator[Metric]:
    """Yield the messages that a process has dropped, by reason.

    Args:
        counters: those of the process.
        service: its name.
    """
    values = {(service, reason): float(counters.get(reason, 0)) for reason in REASONS}
    text = "Messages that were not readable or not allowed."
    yield counter("unicron_messages_dropped_total", text, values, "service", "reason")
