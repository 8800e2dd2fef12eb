"""``unicron upgrade --check``: what an upgrade of a cluster to this program would do; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from cli.options import Format, Output, Server, connected
from cli.output import print_table, printed_json
from shared.errors import Conflict, InvalidInput

Check = Annotated[bool, typer.Option("--check", help="Say what an upgrade to this program would do; change nothing.")]

SIDE_BY_SIDE, TOGETHER, REFUSED = "side by side", "together", "refused"


class Verdict(NamedTuple):
    """What an upgrade does to a part.

    ``running``, ``this``: versions of the cluster and of this program. ``how``: ``SIDE_BY_SIDE`` (both versions work at
    once), ``TOGETHER`` (all of it is stopped first) or ``REFUSED`` (this program cannot go on with what is there).
    """

    part: str
    running: str
    this: str
    how: str
    detail: str = ""


def upgrade(check: Check = False, server: Server = None, output: Output = Format.TEXT) -> None:
    """Say what an upgrade of the cluster to this program would do: what goes on, what stops, what is refused.

    Run it with the new version against the cluster of the old one. Exit status: 0 if old and new work side by side, so
    that nothing has to stop; 4 if parts have to be stopped together, or are refused.
    """
    if not check:
        raise InvalidInput("upgrade: give --check; services and agents are upgraded by whoever runs them")
    with connected(server) as client:
        status = client.get("/v1/status")
    if status.get("versions") is None:
        raise Conflict("the cluster does not say its versions: it is of a version beside which this one does not work")
    verdicts = list(judged(status["versions"], own_versions(), status["checks"]))
    if not printed_json({"verdicts": [verdict._asdict() for verdict in verdicts]}, output):
        print_table(("PART", "RUNNING", "THIS", "UPGRADE", "DETAIL"), verdicts, wide=output is Format.WIDE)
    if any(verdict.how != SIDE_BY_SIDE for verdict in verdicts):
        raise typer.Exit(Conflict.exit_code)


def own_versions() -> dict[str, Any]:
    """Return the versions of this program, as ``shared.interface.readiness.Versions`` has those of a cluster."""
    from services.planner.decide import DECIDER
    from shared.bus.messages import PROTOCOL
    from shared.log.unreadable import NEWEST
    from shared.service.metrics import version

    return {"program": version(), "events": NEWEST, "messages": PROTOCOL, "decider": DECIDER}


def judged(running: Mapping[str, Any], own: Mapping[str, Any], checks: list[dict[str, Any]]) -> Iterator[Verdict]:
    """Yield what becomes of each part: programs one version apart read each other, and no others do.

    Args:
        running: versions of the cluster.
        own: versions of this program.
        checks: how the parts of the cluster are, with the processes of each service.
    """
    from shared.events.union import OLDEST_DECIDER

    yield from _events(running["events"], own["events"])
    yield _apart("messages", running["messages"], own["messages"])
    for protocol, number in running["agents"].items():
        yield _apart(f"agents ({number})", int(protocol), own["messages"], "one after the other; ranks train on")
    if (decider := running["decider"]) is not None:
        refused = not OLDEST_DECIDER <= decider <= own["decider"] + 1
        yield _apart("decider", decider, own["decider"], refused=refused)
    for check in checks:
        if check["name"] in ("detector", "planner", "transition"):
            number = max(len(check["instances"]), 1)
            goes_on = "a standby takes over" if number > 1 else "none stands by: what it does waits for its start"
            yield Verdict(check["name"], str(number), "", SIDE_BY_SIDE if number > 1 else TOGETHER, goes_on)


def _events(running: Mapping[str, int], own: Mapping[str, int]) -> Iterator[Verdict]:
    """Yield the types of events of which the two know different versions; one line if there are none."""
    from shared.events.upcast import oldest

    differ = [kind for kind in sorted({*running, *own}) if running.get(kind) != own.get(kind)]
    if not differ:
        yield Verdict("events", f"{len(running)} types", f"{len(own)} types", SIDE_BY_SIDE)
    for kind in differ:
        there, here = running.get(kind), own.get(kind)
        if there is None or here is None:
            detail = "not known here" if here is None else "the cluster does not know it, and ends where it reads one"
            yield Verdict(kind, str(there or "-"), str(here or "-"), REFUSED if here is None else TOGETHER, detail)
        else:
            refused = there > here + 1 or there < oldest(kind, here)
            yield _apart(kind, there, here, refused=refused)


def _apart(part: str, there: int, here: int, detail: str = "", *, refused: bool = False) -> Verdict:
    """Return the verdict on two versions of something."""
    if refused:
        return Verdict(part, str(there), str(here), REFUSED, "this program does not read it")
    if abs(there - here) > 1:
        return Verdict(part, str(there), str(here), TOGETHER, f"{abs(there - here)} versions apart")
    return Verdict(part, str(there), str(here), SIDE_BY_SIDE, detail)
