"""``unicron run``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from cli.interrupt import INTERRUPTED
from cli.launch.checking import Checked, checked, fork_server_interpreter, said, say, show, unused
from cli.launch.interrupts import OnInterrupt
from cli.options import Format, GivenServer, Output, Ship, ShipFiles
from cli.stack.devices import MOST, Device, DeviceOption

if TYPE_CHECKING:
    from cli.launch.allocation import Allocation
    from cli.launch.course import Launched
    from cli.launch.place import Place
    from cli.launch.specification import Given
    from cli.stack.meeting import Meeting
    from shared.tasks.specification import TaskSpec
    from unicron_client.shipped_code import Shipment

app = typer.Typer(add_completion=False)

INTERPRETERS = "UNICRON_INTERPRETERS"
"""Setting of an agent: the Pythons of its ranks, and of its fork servers."""

ALLOW_SHIPPED_CODE = "UNICRON_ALLOW_SHIPPED_CODE"
"""Setting of an agent: whether it runs code that comes along."""

REFUSED = 3
"""Exit status of a command line that would train wrongly, or is not healed as the user needs it."""

AT_LIMIT = os.EX_TEMPFAIL
"""Exit status of a run that was stopped before the time limit of its job: the same command goes on later."""


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- SCRIPT [ARGS]...",
            help="What stands behind torchrun; torchrun with its options, srun and python may stand in front.",
        ),
    ],
    check: Annotated[
        bool,
        typer.Option("--check", help="Say how the task would run and why; start none. Exit 3 if it is refused."),
    ] = False,
    require_healing: Annotated[
        bool, typer.Option("--require-healing", help="Refuse (exit 3) what would only be healed by whole restarts.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes, at most. Default: as torchrun's options say; else one for each GPU here."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The task's name. Default: that of the script.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME", help="Send this variable, too, to a cluster. May be repeated."),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option("--spec", metavar="FILE", help="Further fields of the task's specification (YAML)."),
    ] = None,
    ship: Ship = None,
    ship_file: ShipFiles = None,
    server: GivenServer = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Run here, in an embedded stack that writes there. Default without a server: .unicron."),
    ] = None,
    device: DeviceOption = Device.AUTO,
    on_interrupt: Annotated[
        OnInterrupt,
        typer.Option(help="Ctrl-C: stop the task with a checkpoint, leave it running on its cluster, or ask."),
    ] = OnInterrupt.ASK,
    stop_before_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="In a Slurm job: stop so long before its time limit, with a checkpoint, and exit 75; 0: never. "
            "Default: 300, or a quarter of the time that is left at the start.",
        ),
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Run what stood behind torchrun, and heal it; with --check, say only how it would be healed.

    The script and its arguments stay as they are. The task runs on the cluster of --server or UNICRON_SERVER, or of a
    server that answers at the default address; else on this machine, in a stack that is started for the time of the
    run. What its ranks print is printed.

    With srun --ntasks-per-node 1 on several nodes, the nodes of that srun are the cluster, for the time of the run.

    Exit status: 0 if the task has succeeded, 1 if it has failed or was stopped, 3 if the command line is refused, 75 if
    it was stopped before the time limit of its Slurm job, 130 if the task was left running.

    --check needs neither a cluster nor a device. Where Megatron-LM's training module can be imported its own parser
    reads the arguments, in a process of its own; elsewhere a table of its releases does. A script of megatron-bridge's
    is run up to its pretrain().
    """
    from cli.launch.allocation import allocation_of

    allocation = allocation_of(os.environ)
    options = _Options(
        check, require_healing, workers, name, env or [], spec, ship, ship_file or (), server, run_dir, device,
        on_interrupt, stop_before_s, output, allocation,
    )  # fmt: skip
    if check or allocation is None:
        if allocation is None or allocation.is_first:
            _run(command, options, None)
        return
    from cli.launch.place import place_of
    from cli.stack.meeting import Meeting

    folder = place_of(server, run_dir, allocation).run_dir
    meeting = Meeting(folder, allocation.name, allocation.node, allocation.nodes)
    if not allocation.is_first:
        raise typer.Exit(_take_part(command, options, meeting, folder))
    with meeting.opened():
        _run(command, options, meeting)


class _Options(NamedTuple):
    """The options of the verb, and the nodes on which srun has started it; None: it has not, or on one alone."""

    check: bool
    require_healing: bool
    workers: int | None
    name: str | None
    env: Sequence[str]
    spec: Path | None
    ship: Path | None
    ship_file: Sequence[str]
    server: str | None
    run_dir: Path | None
    device: Device
    on_interrupt: OnInterrupt
    stop_before_s: float | None
    output: Format
    allocation: Allocation | None


def _run(command: list[str], options: _Options, meeting: Meeting | None) -> None:
    """Check a command line, and run it if that is asked for; the nodes of ``meeting`` are those of the stack."""
    from cli.launch.specification import read_base
    from cli.output import print_json, print_json_line

    base = {} if options.spec is None else read_base(options.spec)
    found, require_healing = checked(command, base), options.require_healing
    refused = found.check.verdict == "refused" or (require_healing and found.check.verdict == "restart")
    if options.check or refused:
        if options.output is Format.JSON:
            print_json_line(found.check.document())
        elif options.check:
            show(found)
        if not refused:
            if lacking := _lacking(found, options, base):
                say(f"a run would be refused: {lacking}")
            return
        for line in said(found) if not options.check else ():
            say(line)
        if require_healing:
            say("--require-healing: it is not healed inside the step")
        raise typer.Exit(REFUSED)

    import asyncio

    from cli.launch.course import course
    from shared.tasks.refusals import why_not_healed

    launched = replace(_launched(found, options, base, meeting), meeting=meeting, stop_before_s=options.stop_before_s)
    if options.output is Format.JSON:
        launched = replace(launched, stream=sys.stderr)
    if require_healing:
        launched = replace(launched, whole=None)
    division = launched.division
    more = [launched.place.said, division.said if division else "", *(_of_slurm(meeting) if division else ()),
            str(launched.shipped or ""), _strength(launched.spec)]  # fmt: skip
    for line in (*said(found), *unused(found), *more):
        if line:
            say(line)
    ending, left, at_limit = asyncio.run(course(launched))
    if ending is None:
        say("interrupted before the task was submitted")
        # With the status of a run that goes on later, a batch script would put its job into the queue for ever.
        raise typer.Exit(1 if at_limit else INTERRUPTED)
    say(ending.line())
    if options.output is Format.JSON:
        shown = found.check.restarting(found.name, ending.task["spec"].get("not_healed", ""))
        document = shown.document()
        print_json({"verdict": document["verdict"], "settings": document["settings"], **ending.document()})
    if left:
        raise typer.Exit(INTERRUPTED)
    if not ending.succeeded:
        if at_limit and ending.task["state"] == "stopped":
            raise typer.Exit(AT_LIMIT)
        raise typer.Exit(REFUSED if require_healing and why_not_healed(ending.task["reason"] or "") else 1)


def _strength(spec: TaskSpec) -> str:
    """Return a line for the user if the task cannot go on with fewer workers, since nothing says its model."""
    if spec.model_known or spec.workers.min == 1 or spec.workers.min != spec.workers.max:
        return ""
    least = spec.workers.min
    return f"trains on {least} workers, and waits if there are fewer, unless --spec has `model` or `workers.min`"


def _lacking(found: Checked, options: _Options, base: Mapping[str, Any]) -> str:
    """Return what a run would be refused for beside its settings, wherever its script is; empty: nothing.

    The arguments may lack what the planner needs, and a variable may look secret.
    """
    from cli.launch import environment
    from cli.launch.specification import Given, specification
    from shared.errors import InvalidInput

    given = Given(options.name, options.workers or found.launch.workers or 1, base=base)
    try:
        if options.server is not None:
            secrets = base.get("secrets", {})
            environment.travelling(os.environ, found.launch.environment, options.env, secrets, Path.cwd())
        specification(found._replace(path=found.path or Path(found.name)), given)
    except InvalidInput as err:
        return str(err)
    return ""


def _take_part(command: list[str], options: _Options, meeting: Meeting, run_dir: Path) -> int:
    """Run the agent of a further node until the run ends; return its exit status.

    Raises:
        UnicronError: as ``take_part``; or the command line starts no script.
    """
    import asyncio

    from cli.launch.other_node import take_part
    from shared.launch.command import parse_command

    for line in filter(None, _of_slurm(meeting)):
        say(line)
    in_front = parse_command(command).environment
    inherited = _inherited(in_front, options.ship is not None)
    return asyncio.run(take_part(meeting, run_dir.resolve(), in_front, inherited, options.device))


def _launched(found: Checked, options: _Options, base: Mapping[str, Any], meeting: Meeting | None) -> Launched:
    """Return what is run. Nothing is started or asked for but a server at the default address, and this machine's GPUs.

    Raises:
        InvalidInput: an option, a variable or the specification is refused.
        NoDevice: workers were to train on devices, and there are too few.
    """
    from cli.launch import environment, place
    from cli.launch.specification import Given
    from shared.errors import InvalidInput
    from shared.tasks.code import SEARCH_PATH, WORKING_DIRECTORY
    from unicron_client.shipped_code import shipment

    where, launch = place.place_of(options.server, options.run_dir, options.allocation), found.launch
    name, env, on_interrupt = options.name, options.env, options.on_interrupt
    shipped = None if options.ship is None else shipment(options.ship, options.ship_file)
    count = options.workers or launch.workers or base.get("workers", {}).get("max")
    here = {WORKING_DIRECTORY: str(Path.cwd())}
    if where.server is not None:
        travelling = environment.travelling(os.environ, launch.environment, env, base.get("secrets", {}), Path.cwd())
        for left_out in travelling.secret:
            say(f"{left_out} stays here: it looks secret; `secrets:` in a file for --spec names it (docs/launching.md)")
        for left_out in travelling.devices:
            say(f"{left_out} stays here: node agents give processes their devices")
        return _specified(found, Given(name, count, {**travelling.env, **here}, base), where, on_interrupt, shipped)
    if on_interrupt is OnInterrupt.LEAVE:
        problem = "needs a cluster (--server): an embedded stack ends with its run. Allowed: stop, ask"
        raise InvalidInput.of("--on-interrupt", on_interrupt.value, problem, f"--on-interrupt: 'leave' {problem}")
    environment.check_named(env, os.environ)
    there, nodes = place.devices_of(launch.environment, options.device), 1 if meeting is None else meeting.nodes
    count = count or nodes * (min(len(there.entries), MOST) or 1)
    inherited = _inherited(launch.environment, shipped is not None)
    if shipped is not None and SEARCH_PATH in inherited:
        here[SEARCH_PATH] = inherited[SEARCH_PATH]  # of the copy, as far as it is in the folder
    launched = _specified(found, Given(name, count, here, base), where, on_interrupt, shipped)
    if (python := fork_server_interpreter(found)) and INTERPRETERS not in os.environ:
        inherited[INTERPRETERS] = python
    division = place.division(there, options.device, count, nodes)
    return replace(launched, division=division, environment=inherited)


def _of_slurm(meeting: Meeting | None) -> tuple[str, str]:
    """Return lines for the user about what srun has given this process, each empty if there is nothing to say."""
    from cli.launch.allocation import COMMANDS, bound, lacks_commands

    lacking = [name for name in COMMANDS if meeting is not None and shutil.which(name) is None]
    return bound(os.environ, len(os.sched_getaffinity(0))), lacks_commands(lacking)


def _inherited(in_front: Mapping[str, str], ships: bool) -> dict[str, str]:
    """Return the variables that processes of an embedded stack inherit beside those of this process."""
    from cli.launch import environment, place

    found = environment.absolute({**_search_path(), **place.inherited(in_front)}, Path.cwd())
    # Who runs it operates this machine.
    return found | ({ALLOW_SHIPPED_CODE: "true"} if ships else {})


def _specified(
    found: Checked, given: Given, where: Place, on_interrupt: OnInterrupt, shipped: Shipment | None
) -> Launched:
    """Return what is run, which may restart whole where its loop's settings are checked as it starts.

    Raises:
        InvalidInput: the specification is refused.
    """
    from cli.launch.course import Launched
    from cli.launch.specification import specification, whole
    from shared.launch.script import Loop
    from unicron_client.specifications import specification as parsed

    def made(fields: dict[str, Any]) -> TaskSpec:
        return parsed(fields) if shipped is None else shipped.of(parsed(fields))

    late = found.check.verdict.value != "restart" and found.script.loop in (Loop.MEGATRON_LM, Loop.BRIDGE)
    return Launched(
        made(specification(found, given)),
        given.name is not None,
        where,
        on_interrupt,
        sys.stdout,
        whole=(lambda why: made(whole(found, given, why))) if late else None,
        shipped=shipped,
    )


def _search_path() -> dict[str, str]:
    """Return the search path of modules that this process has from its environment, if it has one."""
    from shared.tasks.code import SEARCH_PATH

    return {SEARCH_PATH: os.environ[SEARCH_PATH]} if SEARCH_PATH in os.environ else {}
