"""The verbs that show and operate a cluster, against a real server; test_task_verbs.py has a task's life."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import signal
from pathlib import Path
from typing import Any

from cli.records.events import line, records
from shared.bus.connection import Bus
from shared.errors import FaultsDisabled, InvalidInput, Unavailable
from shared.events.union import NodeAdopted, NodeDrained
from shared.log.journal import Journal
from shared.messages.admission import AGENT_RESTART, AgentRestartResult
from shared.messages.injection import FAULTS, FaultResult
from shared.messages.self_test import SELF_TEST, SelfTestResult
from shared.messages.signals import HEARTBEATS, DeviceReading, DeviceStatus
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.cli.conftest import NOWHERE, Unicron, call_unicron, end, start_unicron
from tests.condition import until
from tests.versions.kit import heartbeat

VERBS = {
    ("top",): ("4 in use", "gpt", "running", "95/100", "5s", "p1"),
    ("incidents", "show", "i1"): (
        "process-exit of n1/1",
        "interrupted step",
        "Plan p1 answers",
        "plain-restart (model)",
    ),
    ("ps",): ("gpt", "running", "95/100", "control plane: does not work: detector ("),
    ("show", "gpt"): ("gpt", "running", "95 of 100", "n1/1", "tensor 1, pipeline 1, data 4"),
    ("nodes",): ("n0", "ready", "n1/1", "rank 3"),
    ("cordon", "n1"): ("n1", "cordoned"),
    ("drain", "n1"): ("n1", "draining"),
    ("incidents",): ("process-exit", "SEV2", "n1/1", "0.500", "2.500", "7.500", "live"),
    ("incidents", "i1"): (
        "process-exit",
        "i1",
        "as it was (from the log)",
        "plain-restart (model)",
        "not a measurement",
    ),
    ("postmortem", "i1"): ("process-exit", "What was decided, and why not otherwise", "Plan p1 answers", "n1/1"),
    ("plan", "list"): ("start", "p1", "restart"),
    ("plan", "show", "p1"): ("restart", "i1", "resumed", "restored"),
    ("events",): ("cluster.configured", "state.moved"),
    ("cost",): ("gpt", "total", "process-exit", "sum check ok", "EUR"),
}


async def test_text_and_json_of_every_verb(healed: Server) -> None:
    output = healed.data.parent / "tasks" / "gpt" / "output"
    output.mkdir(parents=True)
    for worker, printed in (("n0-0", "hello\n"), ("n0-1", ""), ("n1-0", "")):
        (output / f"1-{worker}.log").write_text(printed)
    for arguments, words in VERBS.items():
        text = await call_unicron(*arguments, server=healed.url)
        assert (text.code, text.err) == (0, "")
        assert [word for word in words if word not in text.out] == [], text.out
        as_json = await call_unicron(*arguments, "-o", "json", server=healed.url)
        assert (as_json.code, as_json.err) == (0, "")
        document = json.loads(as_json.out)
        if arguments[-1] in {"ps", "nodes", "incidents", "list", "events"}:
            assert set(document) == {"items", "next_cursor"}
            assert document["items"]
    unknown = await call_unicron("incidents", "i9", server=healed.url)
    assert (unknown.code, unknown.out) == (3, "")
    refused = await call_unicron("incidents", "i1", "--task", "gpt", server=healed.url)
    assert (refused.code, refused.out) == (2, "")
    text = await call_unicron("logs", "gpt", server=healed.url)
    assert (text.out, text.err) == ("n0/0 | hello\n", "unicron: output of n1/1 is on n1, which does not answer\n")
    as_json = await call_unicron("logs", "gpt", "--rank", "0", "-o", "json", server=healed.url)
    assert json.loads(as_json.out) == {"worker": "n0/0", "generation": 1, "line": "hello"}


async def test_nodes_says_what_their_devices_report(healed: Server, bus: Bus) -> None:
    device = DeviceStatus(device=3, notes=["92 C, slows down at 90 C"], faults={"xid-31": 2})
    ordinary: dict[str, Any] = {"name": "NVIDIA H200", "driver": "580.1", "memory_bytes": 150_754_820_096}
    cold = DeviceReading(device=2, workers=["n1/0"], temperature_c=36, utilisation_percent=0, **ordinary)
    hot = DeviceReading(device=3, workers=["n1/1"], temperature_c=92, memory_used_bytes=12_345_678_900, **ordinary)
    beat = heartbeat(node="n1", workers=[], devices=[device], device_readings=[cold, hot])
    await bus.publish(HEARTBEATS, beat, "n1")

    async def heard() -> bool:
        return bool((await healed.http.get("/v1/nodes/n1")).json()["devices"])

    await until(heard)
    shown = await call_unicron("nodes", "-o", "wide", server=healed.url)
    heading, *workers, said = (line.split("  ") for line in shown.out.splitlines())
    assert said == ["n1, device 3: xid-31 2 times, 92 C, slows down at 90 C"]
    assert [part.strip() for part in heading if part][-4:] == ["TEMP", "BUSY", "MEMORY", "DRIVER"]
    rows = {row[2]: row for row in ([part.strip() for part in line if part.strip()] for line in workers)}
    assert rows["n0/0"][3:4] + rows["n0/0"][-4:] == ["cpu", "-", "-", "-", "-"]
    assert rows["n1/0"][3:4] + rows["n1/0"][-4:] == ["NVIDIA H200", "36 C", "0%", "150.8 GB", "580.1"]
    assert rows["n1/1"][-4:] == ["92 C", "-", "12.3 of 150.8 GB", "580.1"]


async def test_the_cost_of_a_window_by_node_and_by_day_is_a_table_and_csv(healed: Server) -> None:
    window = ("--from", "2025-03-01T12:00:50", "--to", "2025-03-01T12:02:50")
    as_csv = await call_unicron("cost", *window, "--by", "node", "-o", "csv", server=healed.url)
    assert (as_csv.code, as_csv.err) == (0, "")
    head, *rows = csv.reader(io.StringIO(as_csv.out))
    assert (head[0], head[-2:]) == ("node", ["allocated_worker_s", "money_EUR"])
    kinds = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(row["node"], float(row["allocated_worker_s"]), float(row["detection"])) for row in kinds] == [
        ("n0", 240.0, 1.0),
        ("n1", 240.0, 1.0),
    ]
    text = await call_unicron("cost", *window, "--bucket", "day", server=healed.url)
    assert [word for word in ("2025-03-01", "transition incident", "480", "sum check ok") if word not in text.out] == []
    refused = await call_unicron("cost", "--from", "2025-03-02", "--to", "2025-03-01", server=healed.url)
    assert (refused.code, refused.out) == (InvalidInput.exit_code, "")
    assert "to: must not be before from" in refused.err


async def test_a_node_is_returned_once_its_agent_has_tested_itself(healed: Server, bus: Bus) -> None:
    assert (await call_unicron("cordon", "n1", server=healed.url)).code == 0
    assert (await call_unicron("return", "n1", server=healed.url)).code == Unavailable.exit_code
    view = await asyncio.to_thread(lambda: [r.event for r in healed.journal.log.read_all()])
    (incarnation,) = {event.incarnation for event in view if event.type == "node.joined" and event.node == "n1"}

    async def test(_: bytes) -> bytes:
        return SelfTestResult(incarnation=incarnation).model_dump_json().encode()

    await bus.answer(SELF_TEST.at("n1"), lambda _, data: test(data))
    text = await call_unicron("return", "n1", server=healed.url)
    assert (text.code, text.out, text.err) == (0, "n1: ready\n", "")
    as_json = await call_unicron("return", "n1", "-o", "json", server=healed.url)
    assert json.loads(as_json.out)["state"] == "ready"


async def test_an_agent_is_started_again_and_waited_for(healed: Server, bus: Bus) -> None:
    before = (await healed.http.get("/v1/nodes/n1")).json()
    absent = await call_unicron("agent", "restart", "n1", server=healed.url)
    assert absent.code == Unavailable.exit_code

    asked = asyncio.Event()

    async def hand_over(_: bytes) -> bytes:
        asked.set()
        return AgentRestartResult(incarnation=before["incarnation"]).model_dump_json().encode()

    await bus.answer(AGENT_RESTART.at("n1"), lambda _, data: hand_over(data))
    in_vain = await call_unicron("agent", "restart", "n1", "--timeout-s", "0.2", server=healed.url)
    assert (in_vain.code, in_vain.out) == (Unavailable.exit_code, "")
    assert "node 'n1' has no other agent after 0.2 s" in in_vain.err
    asked.clear()
    waiting = asyncio.create_task(call_unicron("agent", "restart", "n1", server=healed.url))
    await asked.wait()
    await healed.append(NodeAdopted, node="n1", incarnation="2", predecessor=before["incarnation"], agent_pid=77)
    outcome = await waiting
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("n1: ready, agent 77 after ")
    after = (await healed.http.get("/v1/nodes/n1")).json()
    assert (after["incarnation"], after["agent_pid"], after["state"]) == ("2", 77, before["state"])


async def test_a_drain_is_waited_for(healed: Server) -> None:
    waiting = asyncio.create_task(call_unicron("drain", "n1", "--wait", server=healed.url))

    async def drains() -> bool:
        return bool((await healed.http.get("/v1/nodes/n1")).json()["state"] == "draining")

    await until(drains)
    await healed.append(NodeDrained, node="n1")
    outcome = await waiting
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[0] == "n1: drained"
    assert outcome.out.splitlines()[1].startswith("gpt: running at step 95, on n0 n1")


async def test_what_is_not_there_exits_3(unicron: Unicron) -> None:
    for arguments in (
        ["show", "x"],
        ["logs", "x"],
        ["cordon", "x"],
        ["drain", "x"],
        ["return", "x"],
        ["agent", "restart", "x"],
        ["plan", "show", "x"],
        ["show", "a/../b"],
    ):
        outcome = await unicron(*arguments, "-o", "json")
        assert (outcome.code, outcome.out) == (3, "")
        assert json.loads(outcome.err)["status"] == 404


async def test_events_are_followed_until_the_server_ends(settings: Settings, bus: Bus, journal: Journal) -> None:
    async with serving(settings, bus, journal) as server:
        process = await start_unicron("events", "--follow", "-o", "json", server=server.url)
        assert process.stdout is not None
        seen = []
        async with asyncio.timeout(100):
            for name in ("a", "b"):
                await server.http.post("/v1/tasks", json=server.spec(name))
                seen.append(json.loads(await process.stdout.readline())["event"]["task"])
    outcome = await end(process)
    assert (seen, outcome.code, outcome.out, outcome.err) == (["a", "b"], 0, "", "")


async def test_ctrl_c_ends_following_quietly(api: Server) -> None:
    process = await start_unicron("events", "--follow", "-o", "json", server=api.url)
    assert process.stdout is not None
    await api.http.post("/v1/tasks", json=api.spec())
    await asyncio.wait_for(process.stdout.readline(), 100)
    process.send_signal(signal.SIGINT)
    outcome = await end(process)
    assert (outcome.code, outcome.err) == (130, "")


def test_a_line_of_an_event_is_short_and_names_it() -> None:
    record = {
        "position": 7,
        "recorded_at": "2025-03-01T12:00:00.000000+00:00",
        "type": "task.submitted",
        "event": {"event_id": "x", "type": "task.submitted", "task": "gpt", "spec": "y" * 1000},
    }
    text = line(record)
    assert "task.submitted" in text
    assert '"gpt"' in text
    assert len(text) < 300
    assert list(records([": comment", "id: 7", f"data: {json.dumps(record)}", ""])) == [record]


async def test_a_fault_is_asked_for_and_what_is_wrong_is_refused_before(healed: Server) -> None:
    disabled = await call_unicron("inject", "gpt", "--fault", "kill", "--rank", "1", server=healed.url)
    assert (disabled.code, disabled.out) == (FaultsDisabled.exit_code, "")
    assert "UNICRON_FAULT_INJECTION=1" in disabled.err
    for arguments, word in (
        (("gpt", "--fault", "kill"), "--rank"),
        (("gpt", "--fault", "melt", "--rank", "0"), "unknown kind"),
        (("n0", "--fault", "disconnect", "--rank", "0"), "strikes a node"),
    ):
        refused = await call_unicron("inject", *arguments, server=NOWHERE)
        assert (refused.code, refused.out) == (InvalidInput.exit_code, "")
        assert word in refused.err


async def test_injected_faults_are_printed(settings: Settings, bus: Bus, journal: Journal, tmp_path: Path) -> None:
    story = Story(tmp_path / "story.db").running()
    story.log.close()

    async def agree(_: bytes) -> bytes:
        return FaultResult(incarnation="i").model_dump_json().encode()

    for node in ("n0", "n1"):
        await bus.answer(FAULTS.at(node), lambda _, data: agree(data))
    recorded = await journal.append([record.event for record in story.records])
    async with serving(settings.model_copy(update={"fault_injection": True}), bus, journal) as server:
        await server.projected(recorded[-1].position)
        rank = await call_unicron("inject", "gpt", "--fault", "hang", "--rank", "2", "--step", "50", server=server.url)
        assert (rank.code, rank.out) == (0, "gpt: hang=stop in rank 2 (n1/0) at step 50\n")
        of_node = await call_unicron("inject", "n0", "--fault", "disconnect=5", "-o", "json", server=server.url)
        assert json.loads(of_node.out)["fault"] == "disconnect=5"


async def test_a_fault_of_a_rank_is_not_one_of_a_node(
    settings: Settings, bus: Bus, journal: Journal, tmp_path: Path
) -> None:
    story = Story(tmp_path / "story.db").running()
    story.log.close()
    recorded = await journal.append([record.event for record in story.records])
    async with serving(settings.model_copy(update={"fault_injection": True}), bus, journal) as server:
        await server.projected(recorded[-1].position)
        await refuse_what_is_of_another_kind(server.url)


async def refuse_what_is_of_another_kind(url: str) -> None:
    for arguments, code, said in (
        (("n0", "--fault", "kill"), 2, "n0 is a node, and kill strikes a rank of a task: give the task, and --rank"),
        (("n0", "--fault", "kill", "--rank", "1"), 3, "n0 is a node; kill strikes a rank of a task: give the task"),
        (("gpt", "--fault", "kill"), 2, "--rank: kill strikes a rank of a task: give the task, and --rank"),
        (("gpt", "--fault", "disconnect"), 3, "gpt is a task; disconnect strikes a node: give the node"),
    ):
        refused = await call_unicron("inject", *arguments, server=url)
        assert (refused.code, refused.out) == (code, "")
        assert said in refused.err
