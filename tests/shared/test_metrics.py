"""Metrics of a process: what every service has, where it serves them, and who may read them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from shared.bus.connection import Bus
from shared.errors import InvalidInput
from shared.log.journal import Journal
from shared.service import metrics_server
from shared.service.frame import Context
from shared.service.metrics import StateMetrics, counter, gauge
from shared.service.metrics_server import keep_serving
from shared.settings.endpoints import listening
from shared.settings.model import Settings, read_settings
from tests.condition import until
from tests.shared.samples import node_joined

LIMIT_S = 40.0


def values(text: str) -> dict[str, float]:
    """Return the values of a page by name and labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {one.name + "".join(f" {k}={v}" for k, v in sorted(one.labels.items())): one.value for one in samples}


@contextlib.asynccontextmanager
async def served(registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> AsyncIterator[str]:
    """Serve a registry; give the address."""
    caplog.set_level(logging.INFO)
    task = asyncio.create_task(keep_serving(registry, "127.0.0.1", 0, ["metrics.example"]))
    try:
        found = await until(lambda: re.search(r"metrics on (\S+)", caplog.text), seen=lambda: caplog.text)
        yield f"http://{found[1]}"
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_service_has_its_state_and_the_log_s(
    settings: Settings, bus: Bus, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    context = Context(settings, bus, journal, asyncio.Event(), "thing")
    handled = asyncio.Event()

    async def handle(_: object) -> None:
        handled.set()

    following = asyncio.create_task(journal.follow(handle, consumer="thing", after=0))
    await journal.append([node_joined(1)])
    async with asyncio.timeout(LIMIT_S), served(context.registry, caplog) as url, httpx.AsyncClient() as http:
        await handled.wait()
        await journal.relay()
        page = values((await http.get(f"{url}/metrics")).text)
        assert page["unicron_ready service=thing"] == 0
        assert page["unicron_bus_connected service=thing"] == 1
        assert page["unicron_messages_dropped_total reason=undecodable service=thing"] == 0
        assert page["process_resident_memory_bytes"] > 1e6
        context.ready()
        context.counters["undecodable"] = 3
        while page["unicron_log_relayed_position service=thing"] < 1 or page["unicron_ready service=thing"] < 1:
            page = values((await http.get(f"{url}/metrics")).text)
        assert page["unicron_log_handled_position service=thing"] == 1
        assert page["unicron_ready service=thing"] == 1
        assert page["unicron_messages_dropped_total reason=undecodable service=thing"] == 3
    following.cancel()
    await asyncio.wait({following})


async def test_state_is_read_when_it_is_asked_for_and_not_before(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    reads: list[int] = []

    def read() -> list[Metric]:
        reads.append(len(reads))
        return [gauge("unicron_a", "A.", {("x",): 1.5}, "one"), counter("unicron_b_total", "B.", 2.0)]

    registry.register(StateMetrics(read))
    assert reads == []
    async with served(registry, caplog) as url, httpx.AsyncClient() as http:
        assert reads == []
        answer = await http.get(f"{url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert values(answer.text) == {"unicron_a one=x": 1.5, "unicron_b_total": 2.0}
        openmetrics = await http.get(f"{url}/metrics", headers={"Accept": "application/openmetrics-text"})
        assert openmetrics.text.endswith("# EOF\n")
    assert len(reads) == 2


async def test_nothing_else_is_served_and_no_other_host(caplog: pytest.LogCaptureFixture) -> None:
    async with served(CollectorRegistry(), caplog) as url, httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/")).status_code == 404
        assert (await http.post(f"{url}/metrics")).status_code == 405
        assert (await http.get(f"{url}/metrics", headers={"Host": "evil.example"})).status_code == 421
        assert (await http.get(f"{url}/metrics", headers={"Host": "metrics.example:9"})).status_code == 200


async def test_an_address_in_use_is_said_once_and_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "RETRY_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        task = asyncio.create_task(keep_serving(CollectorRegistry(), "127.0.0.1", port))
        await until(lambda: "no metrics: cannot listen" in caplog.text, seen=lambda: caplog.text)
    try:
        async with httpx.AsyncClient() as http:

            async def answer() -> httpx.Response | None:
                with contextlib.suppress(httpx.ConnectError):
                    return await http.get(f"http://127.0.0.1:{port}/metrics")
                return None

            assert (await until(answer)).status_code == 200
        assert caplog.text.count("no metrics") == 1
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("9100", ("127.0.0.1", 9100)),
        ("0.0.0.0:9100", ("0.0.0.0", 9100)),
        ("control:0", ("control", 0)),
        ("[::1]:9100", ("::1", 9100)),
    ],
)
def test_an_address_is_a_port_or_has_one(text: str, found: tuple[str, int] | None) -> None:
    assert listening(text) == found


@pytest.mark.parametrize(
    "text", ["control", ":9100", "control:", "a:b", "a:65536", "99999", "a@b:1", "a:1/x", "[::1:9"]
)
def test_another_text_is_refused_by_the_name_of_its_setting(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_METRICS_ADDRESS", text)
    with pytest.raises(InvalidInput, match=r"metrics_address.*neither HOST:PORT nor PORT") as caught:
        read_settings()
    assert caught.value.extra["errors"][0]["field"] == "metrics_address"
