"""Verbs that read a part: the last events, the last lines, the state that a task is waited for."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.options import moment
from services.planner.decide import DECIDER
from shared.errors import InvalidInput, TimedOut
from shared.events.plans import Response, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, PlanDecided, TaskFinished, TaskProgressed, TaskStopped
from shared.machine.output_times import line_of
from tests.api.kit import START, Server
from tests.cli.conftest import call_unicron, end, start_unicron
from unicron_client import Client
from unicron_client.output import last_lines, matching


async def positions(server: str, *arguments: str) -> list[int]:
    shown = await call_unicron("events", *arguments, "-o", "json", server=server)
    assert shown.code == 0, shown.err
    return [record["position"] for record in json.loads(shown.out)["items"]]


async def test_the_last_events_and_those_since_a_time(healed: Server) -> None:
    everything = await positions(healed.url)
    assert await positions(healed.url, "--last", "3") == everything[-3:]
    assert await positions(healed.url, "--last", "0") == []
    assert await positions(healed.url, "--last", "1000000") == everything
    # The story begins at 12:00:00; its fault is recorded after 100 s.
    later = await positions(healed.url, "--since", "2025-03-01T12:01:40")
    assert 0 < len(later) < len(everything)
    assert later == everything[-len(later) :]
    assert await positions(healed.url, "--since", "2025-03-01T12:01:40", "--last", "1") == everything[-1:]
    assert await positions(healed.url, "--since", "1h") == []
    refused = await call_unicron("events", "--since", "yesterday", server=healed.url)
    assert (refused.code, refused.out) == (2, "")
    assert "--since: 'yesterday' must be like 90s, 10m, 3h, 2d" in refused.err


@pytest.mark.parametrize(
    ("text", "ago_s"), [("90s", 90), ("10m", 600), ("3h", 10_800), ("2d", 172_800), ("0.5h", 1800)]
)
def test_a_time_ago(text: str, ago_s: float) -> None:
    found = moment(text)
    assert found is not None
    assert abs(datetime.now(UTC) - datetime.fromisoformat(found) - timedelta(seconds=ago_s)) < timedelta(seconds=60)


@pytest.mark.parametrize("text", ["", "x", "1e400s", "-s", "2026-13-01", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        moment(text)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text("xy", max_size=3))), st.integers(0, 4))
def test_the_last_lines_of_each_worker_in_their_order(lines: list[tuple[str, str]], number: int) -> None:
    entries = [{"worker": worker, "line": text} for worker, text in lines]
    shown = list(last_lines(entries, number))
    for worker in "abc":
        of = [entry for entry in entries if entry["worker"] == worker]
        assert [entry for entry in shown if entry["worker"] == worker] == (of[-number:] if number else [])
    assert list(last_lines(entries, None)) == entries


def test_what_is_missing_is_always_said() -> None:
    entries = [{"problem": "n1 does not answer"}, {"worker": "a", "line": "loss 3"}, {"worker": "a", "line": "done"}]
    assert list(matching(entries, re.compile("loss"))) == entries[:2]
    assert list(last_lines(entries, 0)) == entries[:1]


async def test_lines_are_searched_and_cut(healed: Server) -> None:
    output = healed.data.parent / "tasks" / "gpt" / "output"
    output.mkdir(parents=True)
    (output / "1-n0-0.log").write_text("loss 3\nloss 2\ndone\n")
    for worker in ("n0-1", "n1-0", "n1-1"):
        (output / f"1-{worker}.log").write_text("")
    found = await call_unicron("logs", "gpt", "--rank", "0", "--grep", "^loss", "--tail", "1", server=healed.url)
    assert (found.code, found.out) == (0, "loss 2\n")
    (output / "1-n0-0.log.times").write_bytes(line_of(1e9, 7))
    for when, lines in (("2001-09-09T01:46:41", "loss 2\ndone\n"), ("2001-09-09T01:46:39", "loss 3\nloss 2\ndone\n")):
        since = await call_unicron("logs", "gpt", "--rank", "0", "--since", when, server=healed.url)
        assert (since.code, since.out) == (0, lines)
    later = await call_unicron("logs", "gpt", "--rank", "0", "--since", "2100-01-01", server=healed.url)
    assert (later.code, later.out) == (0, "")
    refused = await call_unicron("logs", "gpt", "--grep", "(", server=healed.url)
    assert (refused.code, refused.out) == (2, "")
    assert "--grep: '(' must be a regular expression" in refused.err
    shown = await call_unicron("logs", "gpt", "--rank", "0", "--tail", "2", server=healed.url)
    assert (shown.code, shown.out) == (0, "loss 2\ndone\n")
    (output / "1-n0-1.log").write_text("of another\n")
    for worker, lines in (("n0/0", "loss 2\ndone\n"), ("n0/1", "of another\n"), ("n9/9", "")):
        shown = await call_unicron("logs", "gpt", "--worker", worker, "--tail", "2", server=healed.url)
        assert (shown.code, shown.out) == (0, lines)


async def test_a_terminal_is_told_nothing_by_what_a_rank_prints(healed: Server) -> None:
    output = healed.data.parent / "tasks" / "gpt" / "output"
    output.mkdir(parents=True)
    (output / "1-n0-0.log").write_bytes(
        b"\x1b[31mred\x1b[0m\n 10%\r 20%\n\x1b[2J\x1b[Hcleared\n\x1b]0;a title\x1b\\titled\na \x07 bell\n\xc2\x9b5n\n"
    )
    master, terminal = pty.openpty()
    command = (sys.executable, "-m", "cli.main", "logs", "gpt", "--rank", "0", "--server", healed.url)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=terminal)
    os.close(terminal)
    async with asyncio.timeout(50):
        assert await process.wait() == 0
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert shown.split("\r\n") == ["red", " 20%", "cleared", "titled", "a  bell", "\ufffd5n", ""]
    piped = await call_unicron("logs", "gpt", "--rank", "0", "--tail", "6", server=healed.url)
    assert piped.out.startswith("\x1b[31mred\x1b[0m\n")


@pytest.mark.slow
async def test_the_last_lines_and_then_what_comes(healed: Server) -> None:
    output = healed.data.parent / "tasks" / "gpt" / "output"
    output.mkdir(parents=True)
    (output / "1-n0-0.log").write_text("one\ntwo\nthree\n")
    for worker in ("n0-1", "n1-0", "n1-1"):
        (output / f"1-{worker}.log").write_text("")
    process = await start_unicron("logs", "gpt", "--rank", "0", "-f", "--tail", "1", server=healed.url)
    assert process.stdout is not None
    seen = []
    async with asyncio.timeout(50):
        seen.append(await process.stdout.readline())
        with (output / "1-n0-0.log").open("a") as file:
            file.write("four\n")
        seen.append(await process.stdout.readline())
    process.send_signal(signal.SIGINT)
    ended = await end(process)
    assert (seen, ended.out, ended.err) == ([b"three\n", b"four\n"], "", "")


async def test_a_task_that_waits_says_why_it_prints_nothing(api: Server) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    shown = await call_unicron("logs", "gpt", server=api.url)
    (reason,) = {(await api.http.get("/v1/tasks/gpt")).json()["reason"]}
    said = f"unicron: gpt is pending and prints nothing now{f': {reason}' if reason else ''}\n"
    assert (shown.code, shown.out, shown.err) == (0, "", said)
    plan = PlanDecided(
        event_id="p", occurred_at=START, decider=DECIDER, plan="p", trigger=Trigger.TASK_SUBMITTED, cause="c",
        response=Response.NONE, changes=[], queued={"gpt": "needs at least 2 workers"},
    )  # fmt: skip
    (recorded,) = await api.journal.append([plan])
    await api.projected(recorded.position)
    shown = await call_unicron("logs", "gpt", "-o", "json", server=api.url)
    said = "unicron: gpt is queued and prints nothing now: needs at least 2 workers\n"
    assert (shown.code, shown.out, shown.err) == (0, "", said)


async def test_events_of_some_types(healed: Server) -> None:
    everything = (await healed.http.get("/v1/events?limit=1000")).json()["items"]
    of = {
        kind: [one["position"] for one in everything if one["type"] == kind] for kind in ("node.joined", "state.moved")
    }
    assert await positions(healed.url, "--type", "state.moved") == of["state.moved"]
    both = await positions(healed.url, "--type", "node.joined", "--type", "state.moved")
    assert both == sorted([*of["node.joined"], *of["state.moved"]])
    assert await positions(healed.url, "--type", "state.moved", "--last", "2") == of["state.moved"][-2:]
    assert await positions(healed.url, "--type", "node.joined", "--last", "5") == of["node.joined"]
    more = await call_unicron("events", "--type", "state.moved", "--limit", "1", server=healed.url)
    assert more.err == f"more: unicron events --after {of['state.moved'][0]} --type state.moved\n"
    refused = await call_unicron("events", "--type", "node.joint", server=healed.url)
    assert (refused.code, refused.out) == (2, "")
    assert "'node.joint' is no type of events; did you mean 'node.joined'?" in refused.err
    with Client(healed.url) as client:
        followed = await asyncio.to_thread(lambda: next(client.events(types=["state.moved"], follow=True)))
    assert followed.position == of["state.moved"][0]


async def test_the_newest_incidents_and_those_that_are_open(healed: Server) -> None:
    fields = {"kind": ErrorKind.HANG, "severity": Severity.SEV2, "method": Method.STATISTICS, "task": "gpt"}
    for number, at in ((2, "2025-03-01T12:05:00Z"), (3, "2025-03-01T12:06:00Z")):
        recorded = await healed.append(
            ErrorDetected, incident=f"i{number}", detected_at=at, node="n0", worker="n0/0", generation=3, **fields
        )
    await healed.projected(recorded.position)

    async def ids(*arguments: str) -> list[str]:
        shown = await call_unicron("incidents", *arguments, "-o", "json", server=healed.url)
        assert shown.code == 0, shown.err
        return [found["id"] for found in json.loads(shown.out)["items"]]

    assert await ids() == ["i3", "i2", "i1"]
    assert await ids("--last", "2") == ["i3", "i2"]
    assert await ids("--last", "0") == []
    assert await ids("--state", "open") == ["i3", "i2"]
    assert await ids("--state", "closed") == ["i1"]
    assert await ids("--since", "2025-03-01T12:05:30") == ["i3"]
    assert (await call_unicron("incidents", "i1", "--last", "1", server=healed.url)).code == 2
    assert (await call_unicron("incidents", "acknowledge", "i2", server=healed.url)).code == 0
    wide = (await call_unicron("incidents", "-o", "wide", server=healed.url)).out.splitlines()
    assert wide[0].split()[-4:] == ["ACKNOWLEDGED", "BY", "NOTES", "STATE"]
    assert wide[3].split()[-3:] == ["-", "0", "closed"]
    who, notes, state = [cell for cell in wide[2].split("  ") if cell][-3:]
    assert (who.strip()[:4], notes.strip()) == ("uid/", "0")
    assert state.strip() == "open"  # none of its kind was healed before
    assert "NOTES" not in (await call_unicron("incidents", server=healed.url)).out.splitlines()[0].split()


async def test_show_says_all_that_change_sets_and_what_became_of_the_name(healed: Server) -> None:
    def fields(shown: str) -> dict[str, str]:
        return {name: value for name, _, value in (line.partition(" ") for line in shown.splitlines()) if value}

    await call_unicron("change", "gpt", "--weight", "2.5", "--min", "2", "--max", "4", server=healed.url)
    first = fields((await call_unicron("show", "gpt", server=healed.url)).out)
    found = [first[name].strip() for name in ("weight", "min_workers", "max_workers", "incidents")]
    assert found == ["2.5", "2", "4", "i1"]
    assert not {"attempt", "deleted_at"} & first.keys()
    stopped = await healed.append(TaskStopped, task="gpt", generation=3, step=96, path="/c96")
    await healed.projected(stopped.position)
    await call_unicron("delete", "gpt", server=healed.url)
    assert "deleted_at" in fields((await call_unicron("show", "gpt", server=healed.url)).out)
    resumed = await call_unicron("resume", "gpt", server=healed.url)
    assert resumed.code == 0, resumed.err
    assert fields((await call_unicron("show", "gpt", server=healed.url)).out)["attempt"].strip() == "2"
    rows = (await call_unicron("show", "gpt", "--attempts", server=healed.url)).out.splitlines()
    assert [row.split()[0] for row in rows] == ["ATTEMPT", "1", "2"]
    assert "stopped, deleted" in rows[1]
    assert "0 to 96" in rows[1]
    as_json = await call_unicron("show", "gpt", "--attempts", "-o", "json", server=healed.url)
    assert [one["number"] for one in json.loads(as_json.out)["items"]] == [1, 2]


@pytest.mark.parametrize(
    ("every", "replicated", "text"),
    [
        (8, False, "every 8 steps (auto)"),
        (8, True, "every 8 steps (auto); another replica, in another failure domain, has the state too"),
        (1, False, "every step (auto)"),
        (0, False, "none"),
    ],
)
async def test_show_says_how_often_the_state_is_copied_to_memory(
    healed: Server, every: int, replicated: bool, text: str
) -> None:
    async def copies() -> list[str]:
        lines = (await call_unicron("show", "gpt", server=healed.url)).out.splitlines()
        return [line.partition(" ")[2].strip() for line in lines if line.startswith("copies_in_memory")]

    assert await copies() == ["-"]
    about = {"task": "gpt", "generation": 3, "step": 96, "workers": 4, "step_s": 1.0}
    reported = await healed.append(TaskProgressed, **about, memory_every=every, replicated=replicated)
    await healed.append(TaskProgressed, **about | {"step": 97})  # that of a fault, which says nothing of copies
    await healed.projected(reported.position + 1)
    assert await copies() == [text]
    shown = json.loads((await call_unicron("show", "gpt", "-o", "json", server=healed.url)).out)
    assert (shown["memory_every"], shown["replicated"]) == (every, replicated)


async def test_waiting_for_a_state(healed: Server) -> None:
    running = await call_unicron("wait", "gpt", "--for", "running", server=healed.url)
    assert (running.code, running.out) == (0, "gpt: running at step 95 of 100\n")
    late = await call_unicron("wait", "gpt", "--timeout", "0", server=healed.url)
    assert late.code == TimedOut.exit_code == 8, "not that of a server which is not reached"
    assert late.err == "unicron: waited 0 s in vain for gpt to end: it is running at step 95 of 100\n"
    late = await call_unicron("wait", "gpt", "--for", "succeeded", "--timeout", "0.25", server=healed.url)
    assert late.err == "unicron: waited 0.25 s in vain for gpt to end: it is running at step 95 of 100\n"
    await healed.append(TaskStopped, task="gpt", generation=1, step=96, path="")
    ended = await call_unicron("wait", "gpt", server=healed.url)
    assert ended.code == 0
    assert ended.out.startswith("gpt: stopped at step 96 of 100")
    as_asked = await call_unicron("wait", "gpt", "--for", "stopped", server=healed.url)
    assert as_asked.code == 0
    other = await call_unicron("wait", "gpt", "--for", "succeeded", "-o", "json", server=healed.url)
    assert (other.code, json.loads(other.out)["state"]) == (1, "stopped")
    unknown = await call_unicron("wait", "no-such", server=healed.url)
    assert unknown.code == 3


async def test_success_is_what_was_waited_for(healed: Server) -> None:
    await healed.append(TaskFinished, task="gpt", generation=1, step=100, samples_sha256="0" * 64, parameters_path="p")
    done = await call_unicron("wait", "gpt", "--for", "succeeded", server=healed.url)
    assert done.code == 0
    assert done.out.startswith("gpt: succeeded at step 100")
