"""The ``unicron`` command: one module for each verb, imported only when the verb is used (``cli/group.py``).

Exit codes: 0 success, 1 failure, 2 invalid input or usage, 3 not found, 4 conflict, 5 server not reachable,
6 a log that fails its checks, 7 not allowed, 8 waited in vain, 130 interrupted (``shared/errors.py``,
docs/operations.md).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

from cli import here
from cli.interrupt import INTERRUPTED
from shared.errors import InvalidInput, UnicronError
from shared.settings.endpoints import DEFAULT_SERVER

GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "Tasks": {
        "run": (
            "cli.launch.run",
            "Run what stood behind torchrun, and heal it; with --check, say only how it would be healed.",
            "unicron run -- torchrun --nproc-per-node 4 train.py --lr 3e-4",
        ),
        "submit": ("cli.tasks.submit", "Submit a task.", "unicron submit examples/gpt-small.yaml"),
        "ps": ("cli.glance.ps", "List tasks.", "unicron ps --state running"),
        "show": ("cli.tasks.show", "Show a task.", "unicron show gpt-small --attempts"),
        "logs": ("cli.tasks.logs", "Print what a task's ranks print.", "unicron logs gpt-small --rank 0 -f"),
        "metrics": (
            "cli.tasks.metrics",
            "Show what a task's script logs, and its loss and throughput, over its steps.",
            "unicron metrics gpt-small lr --against 1",
        ),
        "wait": (
            "cli.tasks.wait",
            "Wait until a task has ended, or is in a state.",
            "unicron wait gpt-small --for running",
        ),
        "result": (
            "cli.tasks.result",
            "Fetch the parameters of a task that has succeeded.",
            "unicron result gpt-small gpt.safetensors",
        ),
        "stop": ("cli.tasks.stop", "Stop a task at the next step, with a checkpoint.", "unicron stop gpt-small"),
        "kill": ("cli.tasks.stop", "End a task at once, without a checkpoint.", "unicron kill gpt-small --yes"),
        "resume": (
            "cli.tasks.stop",
            "Have a task that was stopped or has failed go on from its checkpoint.",
            "unicron resume gpt-small",
        ),
        "change": (
            "cli.tasks.change",
            "Give a task another weight, or other limits of its workers, while it trains.",
            "unicron change gpt-small --weight 3 --max 2",
        ),
        "delete": ("cli.tasks.stop", "List a task that has ended no more.", "unicron delete gpt-small"),
    },
    "What is wrong": {
        "status": (
            "cli.glance.status",
            "Show in ten lines what is wrong, what it loses each hour and what to do; control plane, nodes and tasks.",
            "unicron status",
        ),
        "top": (
            "cli.glance.top",
            "Watch the cluster: workers, WAF, tasks, open incidents and the last plans; q ends.",
            "unicron top",
        ),
        "incidents": (
            "cli.incidents.incidents",
            "List faults and what was done about them.",
            "unicron incidents --task gpt-small --last 5",
        ),
        "postmortem": (
            "cli.incidents.postmortem",
            "Print the post-mortem of a fault: its course, the decisions and their reasons, its cost.",
            "unicron postmortem 5ab2a0c7 -o html --file incident.html",
        ),
        "slow-workers": (
            "cli.tasks.slow_workers",
            "List workers that were slower than their peers, and those that still are.",
            "unicron slow-workers --task gpt-small",
        ),
        "cost": (
            "cli.incidents.cost",
            "Report where worker-seconds went, and what failures cost.",
            "unicron cost --by task",
        ),
        "open": (
            "cli.glance.open",
            "Print a link that lets a browser use the server, with the rights that you have here.",
            "unicron open",
        ),
    },
    "Nodes": {
        "nodes": ("cli.nodes.nodes", "List nodes and their workers.", "unicron nodes --detector"),
        "cordon": (
            "cli.nodes.drain",
            "Place no new work on a node; what runs there stays.",
            "unicron cordon n1 --reason 'a fan'",
        ),
        "drain": (
            "cli.nodes.drain",
            "Empty a node: its tasks move away without a lost step, or save and wait.",
            "unicron drain n1 --wait",
        ),
        "return": ("cli.nodes.return_node", "Use a cordoned, drained or isolated node again.", "unicron return n1"),
        "doctor": (
            "cli.doctor.verb",
            "Check this machine before it joins as a node, and say what to do about each finding.",
            "unicron doctor --preflight",
        ),
        "agent": (
            "cli.nodes.agent",
            "Run this machine's node agent, or have a node's agent started again.",
            "unicron agent restart n1",
        ),
        "watch": (
            "cli.watch.verb",
            "Report troubles of nodes that another system knows of, so that they are drained or isolated.",
            "unicron watch slurm --once",
        ),
        "inject": (
            "cli.incidents.inject",
            "Have a fault happen, as a test: refused unless the setting fault_injection is on.",
            "unicron inject gpt-small --fault kill --rank 1",
        ),
    },
    "Plans and records": {
        "plan": ("cli.planning.plan", "Look at plans, or make one.", "unicron plan list"),
        "simulate": (
            "cli.planning.simulate",
            "Simulate what a history of failures costs a cluster under each policy.",
            "unicron simulate --trace failures.csv",
        ),
        "events": ("cli.records.events", "Print the event log.", "unicron events --follow"),
        "export": (
            "cli.records.export",
            "Write events, incidents, tasks, costs or plans as a flat table: CSV or Parquet.",
            "unicron export incidents --output incidents.csv",
        ),
        "replay": ("cli.records.replay", "Rebuild the state from a log, and check it.", "unicron replay --verify"),
        "archive": (
            "cli.records.archive",
            "Write what a log has and a folder of segments has not as one more segment.",
            "unicron archive archive/ --before 2026-03-01",
        ),
        "backup": (
            "cli.records.backup",
            "Write the whole log to a folder, while the services run; again: what has been added since.",
            "unicron backup backup/",
        ),
        "restore": (
            "cli.records.restore",
            "Make a log of a backup, in an empty database; nothing is overwritten.",
            "unicron restore backup/ --log restored.db",
        ),
    },
    "The whole system": {
        "up": ("cli.stack.up", "Start the whole system on this machine; Ctrl-C stops it.", "unicron up --nodes 2"),
        "demo": (
            "cli.demo.verb",
            "Run the demonstration: two tasks, several faults, and the proof that both healed.",
            "unicron demo",
        ),
        "control": (
            "cli.stack.control",
            "Run the services of the control plane; Ctrl-C stops them.",
            "unicron control",
        ),
        "upgrade": (
            "cli.stack.upgrade",
            "Say what an upgrade of the cluster to this program would do: what goes on, what stops, what is refused.",
            "unicron upgrade --check",
        ),
        "keys": ("cli.nodes.keys", "Make the keys with which services and nodes use NATS.", "unicron keys make"),
        "node": ("cli.nodes.node", "Give a node the right to use NATS, or take it away.", "unicron node add n4"),
        "token": (
            "cli.nodes.token",
            "Make and remove tokens, with which others may use the server.",
            "unicron token add alice --scope submit",
        ),
    },
}
"""Group -> verb -> its module, its help in one line, and an example, so that to list the verbs imports none of them."""

VERBS = {verb: about for verbs in GROUPS.values() for verb, about in verbs.items()}


def load(verb: str) -> Any:
    """Import a verb's module and return its command."""
    from cli import group

    return group.load(VERBS, verb)


@functools.cache
def command() -> Any:
    """Return the command as Typer has it."""
    from cli import group

    return group.group(GROUPS)


def __getattr__(name: str) -> Any:
    """Return ``app``, the command for programs that call it as Typer's, without importing Typer before."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return command()


def print_version() -> None:
    """Print the version of the installation."""
    from importlib import metadata

    try:
        print(f"unicron {metadata.version('unicron-cluster')}")
    except metadata.PackageNotFoundError:
        print("unicron (not installed)")


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether ``-o json`` is among the arguments. They are not parsed yet, and may be wrong."""
    pairs = itertools.pairwise(arguments)
    return {"-ojson", "--output=json"} & set(arguments) != set() or any(
        option in {"-o", "--output"} and value == "json" for option, value in pairs
    )


def report(error: UnicronError, *, as_json: bool) -> None:
    """Print an error to standard error: a sentence, or its problem document."""
    if as_json:
        import json

        print(json.dumps(error.problem(), ensure_ascii=False), file=sys.stderr)
        return
    print(f"unicron: {error.detail}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = wants_json(arguments)
    try:
        code = _run(arguments, as_json=as_json)
        sys.stdout.flush()  # here, where a reader that has ended is no error
        return code
    except BrokenPipeError:
        return _broken_pipe()


def _run(arguments: list[str], *, as_json: bool) -> int:
    """Run the command and report its errors; return the exit code.

    Raises:
        BrokenPipeError: nobody reads standard output any more.
    """
    if arguments[:1] == ["--version"]:
        print_version()
        return 0
    try:
        code = command()(args=arguments, prog_name="unicron", standalone_mode=False)
    except UnicronError as err:
        if err.extra.get("server") == DEFAULT_SERVER:
            err.detail += here.advice()
        report(err, as_json=as_json)
        return err.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as err:
        if err.filename is None:
            raise
        report(_unusable(err), as_json=as_json)
        return InvalidInput.exit_code
    except SystemExit as err:
        if isinstance(err.__context__, BrokenPipeError):  # Typer's answer to it is a failure
            raise err.__context__ from None
        raise
    except Exception as err:
        return _usage(err, as_json=as_json)
    return code if isinstance(code, int) else 0


def _unusable(error: OSError) -> InvalidInput:
    """Return the error of a path that cannot be used: the command has it from the user, or from a setting."""
    return InvalidInput(f"{error.filename} cannot be used: {error.strerror or error}")


def _broken_pipe() -> int:
    """Return success for a reader (such as ``head``) that ended early; standard output is closed to it."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _usage(error: Exception, *, as_json: bool) -> int:
    """Report a wrong use of the command; anything else is raised again.

    Typer's parser is part of Typer or of click, depending on Typer's version. So its exceptions are recognised by their
    attributes: ``exit_code`` and, where they have a message, ``format_message``.
    """
    if type(error).__name__ == "Abort":
        return INTERRUPTED
    message = getattr(error, "format_message", None)
    if message is None or not hasattr(error, "exit_code"):
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message(), file=sys.stderr)
        return InvalidInput.exit_code
    context = getattr(error, "ctx", None)
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    report(InvalidInput(f"{message()}{hint}"), as_json=as_json)
    return InvalidInput.exit_code


if __name__ == "__main__":
    sys.exit(main())
