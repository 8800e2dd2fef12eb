"""``unicron incidents show``: one incident in full, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from cli.ids import id_path
from cli.options import Format, IncidentId, Output, Server, connected
from cli.output import COST_PARTS, FAILURE_PARTS, clock, print_fields, print_json, print_table, printable, text

_PLANS = 3
"""Plans of which the command is printed, the newest: a failure that came again and again has many."""


_FIELDS = ("class", "advice", "error", "detail", "exit", "parameter", "micro_batch", "stalled_s", "limit_s")
"""Entries that are one value, in the order in which they are printed."""

_TEXTS = {"stack": "stacks at the signal", "traceback": "traceback", "last_output": "last output"}
"""Entries of several lines, with their headings."""


def show(
    incident: IncidentId,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Show an incident in full: its phases, what saw it, what was decided and why, its cost, and other answers.

    What other answers would have cost is a model. The last lines are commands that show more. With -o json: the
    incident with the members headline, found, phases and decisions of its post-mortem.
    """
    with connected(server) as client:
        path = id_path(client, "incident", incident)
        shown = client.get(path)
        page = client.get(f"{path}/postmortem")
    if output is Format.JSON:
        print_json(
            {**shown, **{name: page[name] for name in ("headline", "found", "phases")}, "decisions": page["plans"]}
        )
        return
    _print(shown, page, wide=output is Format.WIDE)


def _print(shown: dict[str, Any], page: dict[str, Any], *, wide: bool) -> None:
    print(f"{printable(page['headline'])}\n")
    for line in page["todo"]:
        print(f"what to do: {printable(line)}")
    print()
    _print_facts(shown, page["currency"])
    print()
    phases = [(phase["name"], _seconds(phase["duration_s"]), phase["meaning"]) for phase in page["phases"]]
    print_table(("PHASE", "TIME S", "MEANING"), phases, wide=wide)
    print(f"\n{printable(page['found'])}")
    _print_attempts(shown, wide=wide)
    print_observations(shown, wide=wide)
    for paragraph in paragraphs(shown["evidence"]):
        print(f"\n{paragraph}")
    for plan in page["plans"]:
        print(f"\n{printable(plan['words'] or 'plan ' + plan['id'] + ': its event is archived')}")
    _print_answers(shown, wide=wide)
    _print_notes(shown)
    print()
    print_table(("NEXT", "SHOWS"), next_commands(shown, page), wide=wide)


def _print_facts(shown: dict[str, Any], currency: str) -> None:
    """Print what the log says of the incident, and its cost as measured."""
    names = ("id", "kind", "severity", "method", "worker", "node", "task", "tasks", "rank")
    times = ("occurred_at", "detected_at", "planned_at", "resumed_at", "restored_at", "closed_at")
    given = [datetime.fromisoformat(shown[name]) for name in times if shown[name] is not None]
    close = max(given) - min(given) < timedelta(minutes=1)
    answer = ("response", "plans", "state_source", "steps_recomputed")
    money = [(f"cost.{name}", shown["cost"][name]) for name in (*COST_PARTS, "failure_money")]
    print_fields(
        [
            *((name, shown[name]) for name in names),
            ("step", None if shown["step"] is None else f"{shown['step'] + 1} ({shown['step']} were done)"),
            ("state", state_of(shown)),
            *((name, clock(shown[name], milliseconds=close)) for name in times),
            *((name, shown[name]) for name in answer),
            *money,
            ("cost.currency", currency),
            *fields(shown["evidence"]),
        ]
    )


def kind_of(shown: dict[str, Any]) -> str:
    """Return the kind of an incident, with how often the same failure came in a row.

    Ranks that fail alike in one generation fail once.
    """
    times = len({one["generation"] for one in shown["attempts"]})
    return f"{shown['kind']} x{times}" if times > 1 else str(shown["kind"])


def _print_attempts(shown: dict[str, Any], *, wide: bool) -> None:
    """Print the attempts of an incident whose failure came again."""
    if len(shown["attempts"]) < 2:
        return
    numbers = {of: n for n, of in enumerate(dict.fromkeys(one["generation"] for one in shown["attempts"]), 1)}
    rows = [
        (
            numbers[one["generation"]],
            clock(one["occurred_at"]),
            one["worker"] or one["node"],
            one["step"],
            one["severity"],
            one["response"],
        )
        for one in shown["attempts"]
    ]
    print()
    print_table(("ATTEMPT", "AT (UTC)", "WHERE", "STEP", "SEV", "RESPONSE"), rows, wide=wide)


def state_of(shown: dict[str, Any], *, briefly: bool = False) -> str:
    """Return whether an incident is open, how late it is then, and which tasks did not survive it."""
    if shown["failed_tasks"]:
        how = f"{', '.join(shown['failed_tasks'])} failed"
        return how if shown["closed_at"] else f"open: {how}"
    if shown["closed_at"]:
        return "closed" if shown["restored_at"] else "closed, not healed"
    if shown["stuck_s"] is None:
        return "open"
    if briefly:
        return f"stuck +{shown['stuck_s']:.0f} s"
    from shared.views.incident_parts import than_usual

    return f"open: stuck, {shown['stuck_s']:.0f} s longer than {than_usual(shown['usual_s'])}"


def print_observations(shown: dict[str, Any], *, wide: bool) -> None:
    """Print what ranks and methods saw of the incident, and which of it is the root cause."""
    if not shown["observations"]:
        return
    rows = [
        (
            clock(one["at"]),
            one["kind"],
            one["method"],
            one["worker"] or one["node"],
            one["rank"],
            one["error"],
            one["detail"],
        )
        for one in shown["observations"]
    ]
    print()
    columns = ("SEEN AT (UTC)", "WHAT", "SEEN BY", "WHERE", "RANK", "ERROR", "DETAIL")
    print_table(columns, rows, least=("ERROR", "SEEN BY", "RANK", "SEEN AT (UTC)"), wide=wide)
    if shown["omitted"]:
        print(f"and {shown['omitted']} more")
    cause = shown["root_cause"]
    where = cause["worker"] or cause["node"] or shown["task"]
    print(printable(f"root cause: {cause['kind']} ({cause['error']}) of {where}"))


def _print_answers(shown: dict[str, Any], *, wide: bool) -> None:
    """Print the cost as measured, and apart from it what models say of other answers."""
    cost = shown["cost"]
    failure_s = sum(cost[name] for name in FAILURE_PARTS)
    rows = [("as it was (from the log)", failure_s, cost["lost_flop"])]
    rows += [(f"{one['answer']} (model)", one["worker_s"], one["lost_flop"]) for one in shown["counterfactuals"]]
    print()
    print_table(("ANSWER", "WORKER-S", "LOST WEIGHTED FLOP"), rows, wide=wide)
    for one in shown["counterfactuals"]:
        print(f"\n{one['answer']} is a model, not a measurement. It assumes:")
        for assumption in one["assumptions"]:
            print(f"- {assumption}")
    if not shown["counterfactuals"]:
        print("\nno other answer: the log has too little for a model")


def _print_notes(shown: dict[str, Any]) -> None:
    """Print who has acknowledged the incident, and what people have noted; an older server has neither."""
    if acknowledged := shown.get("acknowledged"):
        print(f"\nacknowledged by {printable(acknowledged['by'])}, {clock(acknowledged['at'])}")
    notes = shown.get("notes") or []
    if notes:
        print("\nnotes:")
    for note in notes:
        print(f"- {clock(note['at'])}, {printable(note['by'])}: {printable(note['text'])}")


def next_commands(shown: dict[str, Any], page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the commands that show more of what an incident concerns, and what each of them shows."""
    yield _command("postmortem", shown["id"]), "the incident as a page, with its course and others like it"
    for plan in shown["plans"][-_PLANS:]:
        yield _command("plan", "show", plan), "the plan that answered it, with its milestones"
    for task in shown["tasks"]:
        yield _command("show", task), "the task as it is now"
    if shown["task"] and shown["worker"]:  # ranks are renumbered after a fault
        yield _command("logs", shown["task"], "--worker", shown["worker"]), "what it printed, before and after"
    if shown["node"]:
        yield _command("nodes"), f"node {shown['node']} among the others"
    positions = [moment["position"] for moment in page["timeline"] if moment["position"] is not None]
    if positions:
        yield _command("events", "--after", str(min(positions) - 1)), "the log from its first event on"


def _command(*words: str) -> str:
    return shlex.join(("unicron", *words))


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def fields(evidence: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the entries that are one value, by name."""
    return [(f"evidence.{name}", text(evidence[name])) for name in _FIELDS if evidence.get(name) is not None]


def paragraphs(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rest: who is missing from which collective, what the ranks do, and texts of processes."""
    for found in _objects(evidence, "collectives"):
        yield printable(_collective(found))
    for worker, found in _mapping(evidence, "without_stack").items():
        yield printable(f"{worker} (rank {found.get('rank')}, state {found.get('state')}): {found.get('detail')}")
    for found in _objects(evidence, "stacks"):
        ranks, workers = text(found.get("ranks")), text(found.get("workers"))
        yield printable(f"stacks of rank {ranks} ({workers}):\n{found.get('stack')}")
    if left_out := evidence.get("stacks_left_out"):
        yield f"{text(left_out)} more stacks are left out"
    for name, heading in _TEXTS.items():
        if isinstance(lines := evidence.get(name), str) and lines.strip():
            yield printable(f"{heading}:\n{lines.rstrip()}")


def _collective(found: Mapping[str, Any]) -> str:
    """Return one line about a collective that does not end."""
    what = f"{found.get('collective')} (number {found.get('sequence')} of group {found.get('group')})"
    lines = [f"rank {text(found.get('entered'))} waits in {what}"]
    if found.get("missing"):
        lines.append(f"rank {text(found['missing'])} has not entered it")
    if found.get("unknown"):
        lines.append(f"rank {text(found['unknown'])} gave no answer")
    return "; ".join(lines if len(lines) > 1 else [*lines, "all ranks have entered it"])


def _objects(evidence: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = evidence.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _mapping(evidence: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    found = evidence.get(name)
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}
