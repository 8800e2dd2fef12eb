"""``unicron doctor``."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Format, Output
from cli.output import print_table, printed_json
from shared.errors import InvalidInput, UnicronError

if TYPE_CHECKING:
    from shared.settings.model import Settings

PORT = 7642
"""Port of a listener, if none is named: no service of Unicron or NATS has it."""


def doctor(
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="A node on which `unicron doctor --listen` runs. Repeatable."),
    ] = None,
    listen: Annotated[
        bool, typer.Option("--listen", help="Answer the doctors of other nodes until Ctrl-C, and check nothing.")
    ] = False,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="With --listen: where; port 0 is any free one.")
    ] = f"0.0.0.0:{PORT}",  # nosec B104 # the answers say versions and time, and only while the command runs
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Measure what training does, for half a minute, and check nothing else.")
    ] = False,
    state_bytes: Annotated[
        int | None, typer.Option(min=0, help="Model and optimizer state of this node's workers, for /dev/shm.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run directory. Default: UNICRON_RUN_DIR.")] = None,
    output: Output = Format.TEXT,
) -> None:
    """Check this machine before it joins as a node, and say what to do about each finding.

    Takes the settings of the agent (UNICRON_*): with a credential, NATS is tried. Exit status 1 if a check
    failed, or a rate is slow.
    """
    from cli.doctor.checks import Verdict, findings
    from cli.doctor.measuring import measure
    from shared.settings.model import read_settings

    settings = read_settings(run_dir=run_dir) if run_dir is not None else read_settings()
    if listen:
        asyncio.run(_listen(settings, bind))
        return
    if preflight:
        from cli.doctor.preflight import preflight as measure_rates

        measure_rates(settings, output)
        return
    facts = asyncio.run(measure(settings, peer or [], state_bytes))
    found = findings(facts)
    if not printed_json({"findings": [one._asdict() for one in found], "facts": facts.model_dump(mode="json")}, output):
        print_table(("CHECK", "VERDICT", "FINDING"), ((one.check, one.verdict, one.finding) for one in found))
        advised = [(one.check, one.advice) for one in found if one.advice]
        if advised:
            # A table of its own: beside the findings, which are sentences too, it would not fit a terminal.
            print()
            print_table(("CHECK", "WHAT TO DO"), advised)
    if any(one.verdict is Verdict.FAILED for one in found):
        raise typer.Exit(UnicronError.exit_code)


async def _listen(settings: Settings, bind: str) -> None:
    """Answer other nodes until this process is asked to end.

    Raises:
        InvalidInput: that is no address of this machine, or the port is in use.
    """
    from cli.doctor.between_nodes import Listener, address_of
    from cli.doctor.measuring import rank_pythons

    host, port = address_of(bind)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listener = Listener(settings.node, (await rank_pythons(settings))[0].versions)
    try:
        port = await listener.start(host, port)
    except OSError as err:
        raise InvalidInput(f"--bind: {bind!r} cannot be listened on: {err.strerror or err}") from err
    print(f"listening {host}:{port}", flush=True)
    await stop.wait()
    listener.close()
