"""The agent's self-test, which is asked of a node before it is used again."""

from __future__ import annotations

from services.agent.agent import Agent
from shared.bus import Bus
from shared.self_test import SELF_TEST, SELF_TEST_RESULT, SelfTest
from shared.settings import Settings
from tests.agent.kit import WAIT_S, Driver


async def problem(bus: Bus, *, empty: bool = False) -> str:
    """Have the agent test itself; return what is wrong."""
    request = SelfTest(empty=empty).model_dump_json().encode()
    answer = await bus.request(f"{SELF_TEST}.n0", request, timeout_s=WAIT_S)
    result = SELF_TEST_RESULT.validate_json(answer)
    assert result.incarnation == "0" * 32
    return result.problem


async def test_a_node_that_works_passes(agent: Agent, bus: Bus, settings: Settings) -> None:
    assert await problem(bus, empty=True) == ""
    assert [path.name for path in settings.memory_dir.glob(".self-test-*")] == []


async def test_an_isolated_node_must_have_no_processes(agent: Agent, bus: Bus, driver: Driver) -> None:
    assert (await driver.prepare()).ok
    assert await problem(bus) == ""
    assert "n0/0 still has a process of task gpt" in await problem(bus, empty=True)


async def test_a_folder_that_cannot_be_written_to_fails_it(agent: Agent, bus: Bus, settings: Settings) -> None:
    folder = settings.run_dir / "nodes" / "n0"
    folder.rename(folder.with_name("moved"))
    folder.write_text("a file in its place")
    assert "cannot be written to" in await problem(bus)


async def test_a_fork_server_that_starts_nothing_fails_it(agent: Agent, bus: Bus) -> None:
    servers = agent._fork_servers
    server, servers._server = servers._server, None  # it has ended, and none can be started
    try:
        assert "fork server has not started a process" in await problem(bus)
    finally:
        servers._server = server


async def test_a_request_that_cannot_be_read_is_answered(agent: Agent, bus: Bus) -> None:
    answer = await bus.request(f"{SELF_TEST}.n0", b"[]", timeout_s=WAIT_S)
    assert "cannot be read" in SELF_TEST_RESULT.validate_json(answer).problem
