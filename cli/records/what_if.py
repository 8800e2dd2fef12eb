"""What ``unicron replay --what-if`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cli.output import distinct_beginnings, print_table
from shared.errors import InvalidInput

if TYPE_CHECKING:
    from services.planner.replay.what_if import Comparison, PlanDifference
    from services.planner.replay.what_if_inputs import Inputs

_MOST_ROWS = 100
"""Plans in the table: a few screens. ``-o json`` has all of them."""


def read_inputs(file: Path) -> Inputs:
    """Return the changed inputs in a file.

    Raises:
        InvalidInput: it cannot be read, or is wrong.
    """
    from services.planner.replay.what_if_inputs import parse_inputs

    try:
        return parse_inputs(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise InvalidInput(f"what-if: cannot read {file}: {err.strerror or err}") from err
    except UnicodeDecodeError as err:
        raise InvalidInput(f"what-if: {file} is not UTF-8 text: {err}") from err


def print_comparison(found: Comparison) -> None:
    """Print a comparison as tables, measurements and model apart."""
    print(f"{found.plans} plans, in place of {found.differing} of them another one is decided")
    if found.differing:
        compared = f"{found.differing_s:.1f} of {found.seconds:.1f} s"
        print(f"compared: {compared}, each of those plans until one gives a task another number of")
        print("workers; --what-if KEY=VALUE simulates the whole history")
    print()
    shown = found.differences[:_MOST_ROWS]
    if shown:
        columns = ("POSITION", "PLAN", "TRIGGER", "SECONDS", "WAF", "WHAT IF", "WORKERS")
        plans = distinct_beginnings([difference.plan for difference in shown])
        print_table(columns, [_row(one, plan) for one, plan in zip(shown, plans, strict=True)])
        print("WAF: FLOP/s with the recorded workers; WHAT IF: with the others")
        if len(shown) < found.differing:
            print(f"and {found.differing - len(shown)} more: -o json has all")
        print()
    rows = [(f"worker-s of {task.task}", task.recorded_worker_s, task.what_if_worker_s) for task in found.tasks]
    rows += [
        ("worker-s", found.measured.worker_s, found.model.worker_s),
        (found.currency or "money", found.measured.money, found.model.money),
    ]
    print_table(
        ("", "MEASURED", "MODEL", "DIFFERENCE"),
        [(what, there, here, f"{here - there:+.6g}") for what, there, here in rows],
    )
    print(f"\nweighted FLOP, what if less recorded, by the model: {found.model.waf_flop:+.6g}")
    for line in _notes(found):
        print(line)


def _row(difference: PlanDifference, plan: str) -> tuple[object, ...]:
    return (
        difference.position,
        plan,
        difference.trigger.value,
        f"{difference.seconds:.3f}",
        difference.recorded_waf_flop_per_s,
        difference.what_if_waf_flop_per_s,
        "\n".join(_workers(difference)),
    )


def _workers(difference: PlanDifference) -> Iterator[str]:
    """Yield a line for each task: its number of workers as recorded, and the other one."""
    for task in sorted(difference.recorded.keys() | difference.what_if.keys()):
        there, here = difference.recorded.get(task, 0), difference.what_if.get(task, 0)
        yield f"{task} {there}" if there == here else f"{task} {there} -> {here}"
    if not difference.workers:
        yield "other workers, or used otherwise"


def _notes(found: Comparison) -> Iterator[str]:
    yield "measured: from the log. model, WAF and FLOP: not measured; assumed:"
    for assumption in found.assumptions:
        yield f"- {assumption}"
    if found.decided_anew:
        yield (
            f"{found.decided_anew} plans are of another decider: compared with what this program decides of the "
            "recorded inputs"
        )
    if found.skipped:
        yield f"{found.skipped} events have parts of a newer version of Unicron, which were skipped"
