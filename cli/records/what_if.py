"""What ``unicron replay --what-if KEY=VALUE,...`` prints: a whole history, measured, simulated, and simulated anew."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cli.output import number, print_table

if TYPE_CHECKING:
    from services.planner.replay.replay import Replayer
    from simulator.what_if.notes import Parameter
    from simulator.what_if.simulation import HistoryComparison

_WIDTH = 80
"""Characters of a line: the text is for terminals, mails and documents alike."""


def history(asked: str, replayer: Replayer, name: str, seeds: int) -> HistoryComparison:
    """Simulate the history of a log with changes; return the comparison.

    Raises:
        InvalidInput: the changes are wrong, or the log cannot be simulated.
        Archived, Corrupt: of the log.
    """
    from cli.progress import progress_bar
    from simulator.what_if.changes import parse_changes
    from simulator.what_if.simulation import compare_histories

    changes = parse_changes(asked)
    with progress_bar(f"{2 * seeds} runs") as progress:
        return compare_histories(replayer, name, changes, seeds, progress)


def print_history(found: HistoryComparison) -> None:
    """Print a comparison of histories; the measured column apart from the modelled ones."""
    asked = ",".join(f"{key}={value}" for key, value in found.changes.items())
    print(
        _wrapped(f"{found.log}, {found.seconds:.0f} s from {found.started_at:%Y-%m-%d %H:%M:%S} UTC; what if {asked}")
    )
    happened = ", ".join(f"{count} {kind}" for kind, count in found.occurrences.items()) or "nothing"
    print(_wrapped(f"what happened: {happened}"))
    print(_wrapped(f"policy: {found.measured.policy}; what if: {found.what_if.policy}") + "\n")
    columns = ("MEASURED", "MODEL", "WHAT IF", "DIFFERENCE", "OF MEASURED")
    print_table(("WORKER-S", *columns), list(_times(found)))
    print()
    print_table(("", *columns), list(_values(found)))
    print()
    print_table(("MEASURED", "MODEL", "WHAT IF", "DIFFERENCE", "SECONDS TO THE END OF"), list(_ends(found)))
    print()
    for line in _legend(found):
        print(line)


def _times(found: HistoryComparison) -> Iterator[tuple[object, ...]]:
    """Yield a row for each kind of time, and for the sums."""
    one, two, three, less = found.measured, found.model, found.what_if, found.difference
    whole = one.allocated_worker_s
    for kind in one.worker_s:
        values = (one.worker_s[kind], two.worker_s[kind], three.worker_s[kind])
        yield _row(kind.replace("_", " "), values, less.worker_s[kind], whole)
    for name, what in (("failure_worker_s", "of failures"), ("allocated_worker_s", "allocated")):
        yield _row(what, (getattr(one, name), getattr(two, name), getattr(three, name)), getattr(less, name), whole)


def _values(found: HistoryComparison) -> Iterator[tuple[object, ...]]:
    """Yield a row for the work done, and for each sum of money."""
    one, two, three, less = found.measured, found.model, found.what_if, found.difference
    currency = found.currency or "money"
    for name, what, whole in (
        ("accumulated_waf_flop", "accumulated WAF, FLOP", one.accumulated_waf_flop),
        ("failure_money", f"{currency} of failures", one.money),
        ("money", f"{currency} allocated", one.money),
    ):
        yield _row(what, (getattr(one, name), getattr(two, name), getattr(three, name)), getattr(less, name), whole)


def _ends(found: HistoryComparison) -> Iterator[tuple[object, ...]]:
    """Yield when each task ends; of one that goes on nothing."""
    for task in found.measured.tasks:
        ends = [totals.tasks[task].ended_s for totals in (found.measured, found.model, found.what_if)]
        _, model_s, what_if_s = ends
        later = None if model_s is None or what_if_s is None else _signed(what_if_s - model_s)
        yield (*("goes on" if end is None else end for end in ends), later, task)


def _row(what: str, values: tuple[float, float, float], difference: float, whole: float) -> tuple[object, ...]:
    """Return a row. ``whole``: the measured amount by which the difference is scaled."""
    return (what, *values, _signed(difference), f"{100 * difference / whole:+.2f}%" if whole else None)


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{number(abs(value))}"


def _legend(found: HistoryComparison) -> Iterator[str]:
    """Yield what the columns are, what they rest on, and what they leave out."""
    yield _wrapped(
        "MEASURED: the ledger of the log. MODEL: the same history simulated, as it was configured. WHAT IF: simulated "
        "with the changes. DIFFERENCE: WHAT IF less MODEL, so both are modelled; OF MEASURED: that, of the measured "
        "allocated time, WAF or money."
    )
    if found.seeds > 1:
        low, high = found.intervals["accumulated_waf_flop"]
        yield _wrapped(
            f"MODEL and WHAT IF: means of {found.seeds} seeds; 95% interval of the difference in accumulated WAF "
            f"{_signed(low)} to {_signed(high)} FLOP"
        )
    waf = found.measured.accumulated_waf_flop
    off = sum(abs(seconds) for seconds in found.model_error.worker_s.values()) / 2
    allocated = found.measured.allocated_worker_s
    yield _wrapped(
        "the model's own error, MODEL less MEASURED: accumulated WAF "
        + (f"{100 * found.model_error.accumulated_waf_flop / waf:+.2f}%" if waf else "-")
        + (f"; {100 * off / allocated:.2f}% of the allocated time is of another kind" if allocated else "")
    )
    for origin, said in (
        ("log", "from the log (medians; samples)"),
        ("change", "from the changes"),
        ("default", "default, without an example in the log"),
    ):
        named = ", ".join(_parameter(each) for each in found.parameters if each.origin == origin)
        if named:
            yield _wrapped(f"{said}: {named}")
    for line in (*found.notes, *(f"assumed: {each}" for each in found.assumptions)):
        yield _wrapped(f"- {line}", indent="  ")


def _parameter(each: Parameter) -> str:
    samples = f" ({each.samples})" if each.samples else ""
    return f"{each.name} {number(each.value)}{samples}"


def _wrapped(line: str, indent: str = "") -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
