"""The agent's self-test, which is asked of a node before it is used again."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import torch

from services.agent.agent import Agent
from services.agent.cluster.self_test import MEMORY_BYTES
from shared.bus.connection import Bus
from shared.events.node_events import CheckResult
from shared.messages import probes
from shared.messages.probes import ProbeTarget
from shared.messages.self_test import (
    BANDWIDTH,
    BANDWIDTH_FLOOR_BYTES_PER_S,
    SELF_TEST,
    SelfTest,
    SelfTestResult,
    run_self_test,
)
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S, Driver
from unicron.process import self_check


async def problem(bus: Bus, *, empty: bool = False) -> str:
    """Have the agent test itself; return what is wrong."""
    request = SelfTest(empty=empty).model_dump_json().encode()
    answer = await bus.request(SELF_TEST.at("n0"), request, timeout_s=WAIT_S)
    result = SELF_TEST.reply.decode(answer)
    assert result.incarnation == "0" * 32
    return result.problem


async def test_an_isolated_node_must_have_no_processes(agent: Agent, bus: Bus, driver: Driver) -> None:
    assert (await driver.prepare()).ok
    assert await problem(bus) == ""
    assert "n0/0 still has a process of task gpt" in await problem(bus, empty=True)


async def test_a_folder_that_cannot_be_written_to_fails_it(agent: Agent, bus: Bus, settings: Settings) -> None:
    folder = settings.run_dir / "nodes" / "n0"
    folder.rename(folder.with_name("moved"))
    folder.write_text("a file in its place")
    assert "cannot be written to" in await problem(bus)


@pytest.mark.slow
async def test_a_fork_server_that_starts_nothing_fails_it(agent: Agent, bus: Bus) -> None:
    servers = agent._fork_servers
    server = servers._servers.pop("")  # it has ended, and none can be started
    try:
        assert "fork server has not started a process" in await problem(bus)
    finally:
        servers._servers[""] = server


async def test_a_request_that_cannot_be_read_is_answered(agent: Agent, bus: Bus) -> None:
    answer = await bus.request(SELF_TEST.at("n0"), b"[]", timeout_s=WAIT_S)
    assert "cannot be read" in SELF_TEST.reply.decode(answer).problem


async def ask(bus: Bus, node: str = "n0", **fields: Any) -> SelfTestResult:
    answer = await bus.request(SELF_TEST.at(node), SelfTest(**fields).model_dump_json().encode(), timeout_s=WAIT_S)
    return SELF_TEST.reply.decode(answer)


@pytest.mark.slow
async def test_a_node_that_works_passes_and_each_check_is_named_with_its_value_and_its_bound(
    agent: Agent, bus: Bus, settings: Settings
) -> None:
    found = await ask(bus, empty=True)
    assert (found.problem, found.incarnation) == ("", "0" * 32)
    assert [path.name for path in settings.memory_dir.glob(".unicron-write-test-*")] == []
    names = [check.name for check in found.checks]
    assert names == ["processes", "devices", "folders", "fork server", "compute", "memory", "bandwidth"]
    by_name = {check.name: check for check in found.checks}
    assert (by_name["compute"].value, by_name["compute"].bound, by_name["compute"].unit) == (0.0, 0.0, "wrong products")
    assert by_name["memory"].detail.startswith(f"of {MEMORY_BYTES // 8} words, ")
    assert by_name["bandwidth"].detail == "left out: no peer to measure with"


async def test_a_wrong_product_and_another_check_fail_by_name(
    agent: Agent, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CheckResult(name="device health", ok=False, value=3, bound=0, unit="uncorrectable errors", detail="GPU 0")

    async def health(_: SelfTest) -> list[CheckResult]:
        return [result]

    agent._self_tests.checks["device health"] = health
    found = await ask(bus, checks=["folders", "device health"])
    assert found.problem == "device health: 3 uncorrectable errors, allowed 0 (GPU 0)"
    assert [check.name for check in found.checks] == ["folders", "device health"]


async def test_the_bandwidth_to_a_peer_is_measured_and_compared(agent: Agent, bus: Bus) -> None:
    address = agent._heartbeats.probe
    peers = {"n0": ProbeTarget(address=address, incarnation=agent.incarnation)}
    found = await ask(bus, checks=[BANDWIDTH], peers=peers)
    (check,) = found.checks
    assert (check.ok, check.bound, check.unit) == (True, BANDWIDTH_FLOOR_BYTES_PER_S, "bytes/s")
    assert check.value is not None
    assert check.value > BANDWIDTH_FLOOR_BYTES_PER_S
    slow = await ask(bus, checks=[BANDWIDTH], peers=peers, least_bytes_per_s=1e15)
    assert slow.problem.startswith("bandwidth: ")
    assert "allowed 1e+15" in slow.problem


async def test_peers_of_an_older_version_are_left_out_and_one_that_is_not_reached_has_rate_0(
    agent: Agent, bus: Bus
) -> None:
    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(probes.line("n1", "other"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as older:
        port = older.sockets[0].getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as closed:
            gone = closed.getsockname()[1]
        peers = {
            "n1": ProbeTarget(address=f"127.0.0.1:{port}", incarnation="other"),
            "n2": ProbeTarget(address=f"127.0.0.1:{gone}", incarnation="gone"),
        }
        (check,) = (await ask(bus, checks=[BANDWIDTH], peers=peers)).checks
    assert (check.ok, check.value, check.detail) == (False, 0.0, "n2 0")


async def test_the_peers_own_rate_decides_what_is_enough(bus: Bus) -> None:
    """The first peer measures the others; a quarter of its rate is asked of the node."""
    requests: list[tuple[str, SelfTest]] = []

    async def serve(name: str) -> None:
        async def answer(data: bytes) -> bytes:
            requests.append((name, SELF_TEST.request.decode(data)))
            check = CheckResult(name=BANDWIDTH, ok=True, value=4e9)
            return SelfTestResult(incarnation="i", checks=[check]).model_dump_json().encode()

        await bus.answer(SELF_TEST.at(name), lambda _, data: answer(data))

    await serve("n1")
    await serve("n9")
    peers = {f"n{i}": ProbeTarget(address="127.0.0.1:1", incarnation="i") for i in range(1, 5)}
    assert (await run_self_test(bus, "n9", peers, empty=True)).problem == ""
    (first, among), (node, own) = requests
    assert (first, among.checks, sorted(among.peers)) == ("n1", [BANDWIDTH], ["n2", "n3"])
    assert (node, own.empty, own.checks, sorted(own.peers)) == ("n9", True, [], ["n1", "n2", "n3"])
    assert own.least_bytes_per_s == 1e9


def test_the_digest_is_that_of_the_exact_product() -> None:
    one, other = self_check.matrices("cpu")
    exact = one.to(torch.int64) @ other.to(torch.int64)
    assert self_check.digest(exact.to(torch.float32)) == self_check.DIGEST
    assert int(exact.abs().max()) < 1 << 24


def test_a_processor_that_computes_otherwise_and_memory_that_forgets_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "DIGEST", "0" * 64)
    assert self_check.compute("cpu")["ok"] is False
    monkeypatch.undo()
    monkeypatch.setattr(self_check, "COMPUTE_S", 0.0)
    assert self_check.compute("cpu")["ok"] is True
    fill = torch.Tensor.fill_

    def stuck(words: torch.Tensor, value: int) -> torch.Tensor:
        fill(words, value)[7] |= 1
        return words

    monkeypatch.setattr(torch.Tensor, "fill_", stuck)
    found = self_check.memory("cpu", 1 << 20)
    assert (found["ok"], found["value"], found["unit"]) == (False, 2.0, "wrong words")
