"""``unicron change``."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.options import Format, Output, Server, TaskName, connected
from cli.output import number, printed_json

ANY = "any"
"""Value of ``--max`` that lifts the limit."""


def change(
    task: TaskName,
    weight: Annotated[float | None, typer.Option(help="Its priority among all tasks.")] = None,
    least: Annotated[int | None, typer.Option("--min", help="Fewest workers with which it runs.")] = None,
    most: Annotated[
        str | None, typer.Option("--max", metavar="NUMBER|any", help="Most workers that it may have.")
    ] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Give a task another weight, or other limits of its workers, while it trains.

    The planner divides the workers anew at once. What is not given stays.
    """
    patch = merge_patch(weight, least, most)
    with connected(server) as client:
        answer = client.request("PATCH", f"/v1/tasks/{quote(task, safe='')}", patch)
    if not printed_json(answer, output):
        limits = answer["spec"]["workers"]
        top = ANY if limits["max"] is None else limits["max"]
        print(f"{answer['name']}: weight {number(answer['weight'])}, {limits['min']} to {top} workers")


def merge_patch(weight: float | None, least: int | None, most: str | None) -> dict[str, Any]:
    """Return the merge patch that the options mean.

    Raises:
        InvalidInput: none of them is given, or ``--max`` is no number.
    """
    from shared.errors import InvalidInput

    limits: dict[str, int | None] = {} if least is None else {"min": least}
    if most is not None:
        if most != ANY and not most.isdecimal():
            raise InvalidInput.of("--max", most, f"must be a number or {ANY}")
        limits["max"] = None if most == ANY else int(most)
    patch: dict[str, Any] = {} if weight is None else {"weight": weight}
    if limits:
        patch["workers"] = limits
    if not patch:
        raise InvalidInput("nothing to change: give --weight, --min or --max")
    return patch
