"""Verbs that read a part: the last events, the last lines, the state that a task is waited for."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.logs import last_lines, matching
from cli.options import moment
from shared.errors import InvalidInput
from shared.events import TaskFinished, TaskStopped
from shared.output_times import line_of
from tests.api.kit import Server
from tests.cli.conftest import call_unicron


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
    refused = await call_unicron("logs", "gpt", "--tail", "1", "-f", server=healed.url)
    assert refused.code == 2


async def test_waiting_for_a_state(healed: Server) -> None:
    running = await call_unicron("wait", "gpt", "--for", "running", server=healed.url)
    assert (running.code, running.out) == (0, "gpt: running at step 95 of 100\n")
    late = await call_unicron("wait", "gpt", "--timeout", "0", server=healed.url)
    assert late.code == 5
    assert "waited 0 s in vain" in late.err
    await healed.append(TaskStopped, task="gpt", generation=1, step=96, path="")
    ended = await call_unicron("wait", "gpt", server=healed.url)
    assert ended.code == 0
    assert ended.out.startswith("gpt: stopped at step 96 of 100")
    other = await call_unicron("wait", "gpt", "--for", "succeeded", "-o", "json", server=healed.url)
    assert (other.code, json.loads(other.out)["state"]) == (1, "stopped")
    unknown = await call_unicron("wait", "no-such", server=healed.url)
    assert unknown.code == 3


async def test_success_is_what_was_waited_for(healed: Server) -> None:
    await healed.append(TaskFinished, task="gpt", generation=1, step=100, samples_sha256="0" * 64, parameters_path="p")
    done = await call_unicron("wait", "gpt", "--for", "succeeded", server=healed.url)
    assert done.code == 0
    assert done.out.startswith("gpt: succeeded at step 100")
