"""``unicron plan solve``: the best worker counts of a problem in a file. Needs no cluster."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Format, Output
from cli.output import print_fields, print_json, print_table

if TYPE_CHECKING:
    from shared.planning.standalone import StandaloneAnswer


def solve(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM.json", help="The problem; - reads standard input.")],
    output: Output = Format.TEXT,
) -> None:
    """Find the best worker counts for the tasks of a problem, and prove that they are."""
    from cli.progress import progress_bar
    from shared.planning.standalone import parse_problem, solve_standalone

    asked = parse_problem(_read(problem))
    with progress_bar("the plan is solved"):
        answer = solve_standalone(asked)
    if output is Format.JSON:
        print_json(answer.model_dump())
    else:
        _print(answer)


def _read(path: Path) -> bytes:
    """Return the contents of a file; its size is checked before it is read.

    Raises:
        NotFound: there is no such file.
        InvalidInput: it cannot be read, or is too large.
    """
    from shared.errors import InvalidInput, NotFound
    from shared.planning.standalone import MAX_PROBLEM_BYTES, check_size

    try:
        with open("/dev/stdin" if str(path) == "-" else path, "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                check_size(status.st_size)
            text = file.read(MAX_PROBLEM_BYTES + 1)
    except FileNotFoundError as err:
        raise NotFound(f"there is no file {path}") from err
    except (OSError, ValueError) as err:
        raise InvalidInput(f"cannot read {path}: {err}") from err
    check_size(len(text))
    return text


def _print(answer: StandaloneAnswer) -> None:
    rows = [(t.name, t.workers, t.waf_flop_per_s, t.reward, t.penalty, t.objective, t.reason) for t in answer.terms]
    print_table(("TASK", "WORKERS", "WAF FLOP/S", "REWARD", "PENALTY", "G FLOP", "REASON"), rows)
    print()
    print_fields(
        [
            ("objective_flop", answer.objective),
            ("bound_flop", answer.bound),
            ("price_flop_per_worker", answer.price),
            ("solve_s", answer.solve_s),
        ]
    )
