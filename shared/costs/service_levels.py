"""Service levels: what was achieved of what the best plan on all allocated workers would have achieved. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.costs.charges import Charge
from shared.costs.claims import Part
from shared.costs.intervals import union
from shared.costs.span_claims import Window, interval
from shared.interface.costs import ServiceLevel
from shared.views.documents import SpanKind, SpanView, TaskView


def progress_flop(span: SpanView) -> float:
    """Return the weighted FLOP of the steps of a span of progress that has ended; 0 of any other span."""
    if span.kind is not SpanKind.PROGRESS or span.end is None or span.end <= span.start:
        return 0.0
    return max(span.last_step - span.first_step, 0) * span.flop_per_step


def achieved_flop(spans: Iterable[SpanView], tasks: Mapping[str, TaskView], window: Window, now_s: float) -> float:
    """Return the weighted FLOP of the steps done in the window; those of a span are spread over it evenly."""
    achieved = 0.0
    for span in spans:
        if span.kind is SpanKind.PROGRESS:
            start, end = interval(span)
            end = min(end, now_s)
            task = tasks.get(span.task)
            last = span.last_step if span.end is not None or task is None else task.step
            low, high = window.clip(start, end)
            if high > low:
                share = (high - low) / (end - start)
                achieved += max(last - span.first_step, 0) * span.flop_per_step * share
    return achieved


def healthy_flop(spans: Iterable[SpanView], window: Window) -> float:
    """Return the weighted FLOP of the healthy line in the window."""
    healthy = 0.0
    for span in spans:
        if span.kind is SpanKind.HEALTHY:
            low, high = window.clip(*interval(span))
            healthy += max(high - low, 0.0) * sum(span.waf.values())
    return healthy


def service_level(kinds: Mapping[str, float], achieved: float, healthy: float) -> ServiceLevel:
    """Return the service level of a window. ``kinds``: its worker-seconds by kind."""
    allocated = sum(kinds.values())
    return ServiceLevel(
        availability=fraction(allocated - kinds["lost"], allocated),
        goodput_fraction=fraction(kinds["useful"], allocated),
        achieved_flop=achieved,
        healthy_flop=healthy,
        waf_fraction=fraction(achieved, healthy),
    )


def trained_s(task: TaskView, charges: Iterable[Charge], window: Window) -> float:
    """Return how long some worker of the task trained in the window, from its submission to its end."""
    end_s = window.end_s if task.ended_at is None else task.ended_at.timestamp()
    start, end = window.clip(task.submitted_at.timestamp(), end_s)
    pieces = (piece for charge in charges if charge.claim.part is Part.TRAINING for piece in charge.intervals)
    return sum(max(min(high, end) - max(low, start), 0.0) for low, high in union(pieces))


def fraction(part: float, whole: float) -> float | None:
    """Return the part over the whole; None where the whole is zero."""
    return part / whole if whole > 0.0 else None
