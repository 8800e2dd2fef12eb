"""``unicron show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cli.options import Format, Output, Server, TaskName, connected
from cli.output import clock, number, print_fields, print_table, printed_json
from unicron_client.answers import restarts_whole, step_of

if TYPE_CHECKING:
    from unicron_client.resources import Client

_INCIDENTS = 3
"""Ids of incidents that are shown, the newest first; `unicron incidents --task` lists all."""


def _failure(failure: dict[str, Any] | None) -> str | None:
    """Return the newest checkpoint that could not be written, or why copies in memory are missing, in words."""
    if failure is None:
        return None
    return f"step {failure['step']}, {clock(failure['at'])}, {failure['worker']}: {failure['reason']}"


def _wait(wait: dict[str, Any], task: str) -> str:
    """Return until when no process of a task is started, and why, in words."""
    if wait["until"] is None:
        return f"until `unicron resume {task}`: {wait['reason']}"
    return f"until {clock(wait['until'])}, or `unicron resume {task}`: {wait['reason']}"


def _copies(shown: dict[str, Any]) -> str | None:
    """Return how often the state is copied to memory, in words: what a fault can cost at most, and when nothing."""
    every = shown["memory_every"]
    if every is None:
        return None
    chosen = " (auto)" if shown["spec"]["checkpoint"]["memory_every"] == "auto" else ""
    text = f"every {every} steps{chosen}" if every > 1 else f"every step{chosen}" if every else "none"
    replicated = "; another replica, in another failure domain, has the state too"
    return f"{text}{replicated}" if shown["replicated"] else text


def _layout(shown: dict[str, Any]) -> str:
    """Return how the task divides its work, in words; how a script does that restarts whole, only it knows."""
    if restarts_whole(shown["spec"]):
        return "the script's own"
    return ", ".join(f"{name} {size}" for name, size in (shown["layout"] or {}).items())


def _kept(kept: dict[str, int]) -> str:
    """Return which nodes keep copies of a task that has no process there, and how large they are, in words."""
    return ", ".join(f"{number(size_bytes)}B on {node}" for node, size_bytes in kept.items())


def _hang_limits(client: Client, shown: dict[str, Any]) -> str | None:
    """Return for how long ranks may make no progress now, in words; None where the detector does not say."""
    from shared.errors import UnicronError

    if not shown["ranks"] or restarts_whole(shown["spec"]):
        return None
    try:
        found = client.get(f"/v1/limits/{quote(shown['name'], safe='')}")
    except UnicronError:
        return None
    longest = found["longest_start_s"]
    seen = "" if longest is None else f" (the longest start so far took {longest:.3g} s)"
    step = "" if found["step_s"] is None else f"a step {found['step_s']:.3g} s, "
    return (
        f"{step}first steps of a process {found['first_steps_s']:.3g} s{seen}, between steps "
        f"{found['between_steps_s']:.3g} s; hard limit, if it is at work there: {found['hard_s']:.3g} s"
    )


def show(
    task: TaskName,
    attempts: Annotated[
        bool, typer.Option("--attempts", help="List every submission of the name, and what became of each.")
    ] = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Show a task.

    The name may be that of a task that was deleted.
    """
    from cli.progress import eta
    from cli.tasks.notable import notable

    path = f"/v1/tasks/{quote(task, safe='')}"
    with connected(server) as client:
        if attempts:
            _print_attempts(client.pages(f"{path}/attempts"), output)
            return
        shown = client.get(path)
        if printed_json(shown, output):
            return
        newest = {"task": shown["name"], "order": "newest", "limit": _INCIDENTS + 1}
        incidents = [found["id"] for found in client.get("/v1/incidents", newest)["items"]]
        hang_limits = _hang_limits(client, shown)
    limits = shown["spec"]["workers"]
    print_fields(
        [
            *((name, shown[name]) for name in ("name", "state", "reason")),
            *([("wait", _wait(shown["wait"], shown["name"]))] if shown["wait"] else []),
            *([("attempt", shown["attempt"])] if shown["attempt"] > 1 else []),
            *([("deleted_at", clock(shown["deleted_at"]))] if shown["deleted_at"] else []),
            *((name, shown[name]) for name in ("weight", "workers")),
            ("min_workers", limits["min"]),
            ("max_workers", "any" if limits["max"] is None else limits["max"]),
            *((name, shown[name]) for name in ("generation", "loss", "step_s")),
            ("step", step_of(shown)),
            ("eta", eta(shown)),
            ("plan", shown["plan"]),
            ("layout", _layout(shown)),
            ("throughput_flop_per_s", shown["throughput_flop_per_s"]),
            ("waf_flop_per_s", shown["waf_flop_per_s"]),
            ("checkpoint", shown["checkpoint"]),
            ("saved_step", shown["saved_step"]),
            ("copies_in_memory", _copies(shown)),
            *([("hang_limits", hang_limits)] if hang_limits is not None else []),
            ("checkpoint_failure", _failure(shown["checkpoint_failure"])),
            *([("copies_lacking", _failure(lack))] if (lack := shown.get("copies_lacking")) else []),
            *([("copies_kept", _kept(kept))] if (kept := shown.get("copies_kept")) else []),
            *([("newcomers_refused", shown["newcomers_refused"])] if shown["newcomers_refused"] else []),
            *(("changed", text) for text in shown["changed"]),
            ("stop_refused", shown["stop_refused"] and shown["stop_refused"]["reason"]),
            *(("notable", text) for text in notable(shown)),
            ("incidents", [*incidents[:_INCIDENTS], *(["..."] if len(incidents) > _INCIDENTS else [])]),
            ("submitted_at", clock(shown["submitted_at"])),
            ("started_at", clock(shown["started_at"])),
            ("ended_at", clock(shown["ended_at"])),
            *((f"result.{name}", value) for name, value in (shown["result"] or {}).items()),
        ]
    )
    if shown["ranks"]:
        print()
        columns = ("rank", "worker", "node", "pid", "state")
        rows = ([rank[name] for name in columns] for rank in shown["ranks"])
        print_table([name.upper() for name in columns], rows)
    _print_settings(shown["spec"])
    if shown["traceback"]:
        print(f"\n{shown['traceback']}")


def _print_settings(spec: dict[str, Any]) -> None:
    """Print why a task restarts whole, argument by argument, and what is switched off in one that need not."""
    from shared.launch.settings import findings_of_task

    loop = spec.get("loop", "unicron")
    found = findings_of_task(loop, spec.get("arguments", []))
    if restarts_whole(spec):
        own = "since its loop is its own: docs/launching.md has what to write instead"
        refused = spec.get("not_healed", "")
        why = f"since a step cannot be healed: {refused}" if refused else "for these settings" if found else own
        print(f"\na fault ends its script on all workers, and starts it again from its own checkpoint, {why}")
    if (code := spec.get("code")) is not None:
        print(f"\nits code has come along: {code['files']} files, {code['size_bytes']} bytes, sha256 {code['digest']}")
    if found:
        rows = [[one.argument, one.what.value, one.why, one.instead.partition("\n")[0]] for one in found]
        print_table(("SETTING", "EFFECT", "WHY", "INSTEAD"), rows)


def _print_attempts(page: dict[str, Any], output: Format) -> None:
    """Print every submission of a name."""
    if printed_json(page, output):
        return
    rows = [
        (
            one["number"],
            f"{one['state']}, deleted" if one["deleted_at"] else one["state"],
            clock(one["submitted_at"]),
            clock(one["started_at"]),
            clock(one["ended_at"]),
            f"{one['first_step']} to {one['last_step']}",
            one["owner"],
            one["flop"],
            one["weighted_flop"],
            one["reason"],
        )
        for one in page["items"]
    ]
    columns = ("ATTEMPT", "STATE", "SUBMITTED (UTC)", "STARTED", "ENDED", "STEPS", "OWNER", "FLOP", "WEIGHTED FLOP")
    least = ("WEIGHTED FLOP", "FLOP", "OWNER", "STARTED", "SUBMITTED (UTC)", "ENDED")
    print_table((*columns, "REASON"), rows, least=least, wide=output is Format.WIDE)
