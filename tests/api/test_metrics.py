"""``/metrics`` of the api: the cluster as the log has it, incidents, plans and requests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from services.api.store.feed import Feed
from services.api.store.fold_metrics import FoldMetrics
from services.api.store.projection_store import Store
from shared.errors import Unavailable
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskStopped, TaskSubmitted
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.service.tokens import Scope
from tests.api.kit import START, Server, Story, bearer, client_of, offline_gateway, spec


def values(text: str) -> dict[str, float]:
    """Return the values of a page by name and labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {one.name + "".join(f" {k}={v}" for k, v in sorted(one.labels.items())): one.value for one in samples}


def with_log(log: EventLog) -> Any:
    """Return as much of a journal as asking for the log's position takes."""
    return SimpleNamespace(log=log)


async def page(api: Server) -> dict[str, float]:
    answer = await api.http.get("/metrics")
    assert answer.status_code == 200
    return values(answer.text)


async def test_the_cluster_of_a_story(story: Story, tmp_path: Path) -> None:
    """Two nodes of two workers; a task on all of them; a process that has ended and is not restored yet."""
    story.running(step_s=2.0).process_exit()
    with offline_gateway(tmp_path, story.records) as gateway:
        gateway.journal = with_log(story.log)
        async with client_of(gateway) as client:
            found = values((await client.get("/metrics")).text)
    assert found["unicron_projections_readable"] == 1
    assert found["unicron_incidents_open severity=SEV2"] == 1
    assert found["unicron_incidents_open severity=SEV1"] == 0
    assert found["unicron_nodes state=ready"] == 2
    assert found["unicron_workers_allocated"] == 4
    assert found["unicron_workers_used"] == found["unicron_task_workers task=gpt"] == 3
    assert found["unicron_task_step_seconds task=gpt"] == 2.0
    waf = spec().batch.global_ * spec().model.flop_per_sample() / 2.0
    assert found["unicron_task_waf_flop_per_second task=gpt"] == pytest.approx(waf)
    assert found["unicron_waf_flop_per_second"] == pytest.approx(waf)
    assert found["unicron_worker_hour_price currency=EUR"] == 3.6
    elapsed_s = (datetime.now(UTC) - START).total_seconds()
    assert sum(value for name, value in found.items() if name.startswith("unicron_worker_seconds")) == pytest.approx(
        4 * elapsed_s, rel=1e-3
    )


async def test_the_series_of_a_task_leave_with_it(api: Server) -> None:
    await api.join("n0")
    assert (await api.http.post("/v1/tasks", json=api.spec())).status_code == 201
    assert (await page(api))["unicron_task_workers task=gpt"] == 0
    assert (await api.http.post("/v1/tasks/gpt/stop")).status_code == 202
    stopped = await api.append(TaskStopped, task="gpt", generation=0, step=0, path="")
    await api.projected(stopped.position)
    assert [name for name in await page(api) if "task=gpt" in name] == []


async def test_an_incident_and_its_detection_are_counted(api: Server) -> None:
    await api.join("n0")
    now = datetime.now(UTC)
    fields = {
        "kind": ErrorKind.PROCESS_EXIT,
        "method": Method.PROCESS_SUPERVISION,
        "occurred_at": now - timedelta(seconds=4),
        "detected_at": now - timedelta(seconds=1),
        "node": "n0",
    }
    await api.append(ErrorDetected, incident="i1", severity=Severity.SEV3, **fields)
    last = await api.append(ErrorDetected, incident="i1", severity=Severity.SEV2, **fields)
    await api.projected(last.position)
    found = await page(api)
    kind = ErrorKind.PROCESS_EXIT.value
    assert found[f"unicron_incidents_total kind={kind} severity=SEV3"] == 1
    assert found["unicron_incident_escalations_total severity=SEV2"] == 1
    assert found[f"unicron_incident_detection_seconds_count kind={kind}"] == 1
    assert found[f"unicron_incident_detection_seconds_sum kind={kind}"] == pytest.approx(3.0)
    assert found["unicron_log_position"] == last.position


def test_recovery_counts_once_an_incident_is_over(story: Story, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = FoldMetrics(registry)
    store = Store(f"sqlite:///{tmp_path / 'projections.db'}")
    story.running().process_exit()
    store.fold(story.records, metrics.folded)
    name, severity = "unicron_incident_recovery_seconds", {"severity": "SEV2"}
    assert registry.get_sample_value(f"{name}_count", severity) is None
    for record in story.process_restored().records:
        store.fold([record], metrics.folded)
    store.close()
    assert registry.get_sample_value(f"{name}_count", severity) == 1
    assert registry.get_sample_value(f"{name}_sum", severity) == 8.0  # from second 100 to second 108
    plans = {"trigger": "error", "response": "restart"}
    assert registry.get_sample_value("unicron_plans_total", plans) == 1


@pytest.mark.parametrize("known", [False, True], ids=["anew", "going on"])
async def test_what_came_while_no_api_ran_counts_and_a_fold_from_the_start_does_not(
    journal: Journal, tmp_path: Path, known: bool
) -> None:
    registry = CollectorRegistry()
    store = Store(f"sqlite:///{tmp_path / 'projections.db'}")

    def submitted(name: str) -> TaskSubmitted:
        return TaskSubmitted(event_id=name, occurred_at=START, task=name, spec=spec(name))

    def error(name: str) -> ErrorDetected:
        return ErrorDetected(
            event_id=name,
            occurred_at=START,
            incident=name,
            kind=ErrorKind.EXCEPTION,
            severity=Severity.SEV3,
            method=Method.EXCEPTION,
            detected_at=START,
        )

    first = await journal.append([submitted("a"), error("i1")])
    if known:
        store.fold(first)
    await journal.append([error("i2")])
    await Feed(store, journal, FoldMetrics(registry).folded).catch_up()
    store.close()
    total = registry.get_sample_value("unicron_incidents_total", {"kind": "exception", "severity": "SEV3"})
    assert total == (1 if known else None)


async def test_requests_are_counted_by_route_and_not_by_path(api: Server) -> None:
    for path in ("/v1/tasks/one", "/v1/tasks/two", "/nowhere"):
        await api.http.get(path)
    await api.http.get("/healthz", headers={"Host": "evil.example"})
    found = await page(api)
    assert found["unicron_http_requests_total method=GET route=/v1/tasks/{name} status=404"] == 2
    assert found["unicron_http_request_seconds_count method=GET route=/v1/tasks/{name}"] == 2
    assert found["unicron_http_requests_total method=GET route=none status=404"] == 1
    assert found["unicron_http_requests_total method=GET route=none status=421"] == 1
    assert not [name for name in found if "/nowhere" in name or "/v1/tasks/one" in name]


async def test_a_token_to_read_is_enough_and_none_is_not(story: Story, tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway:
        gateway.journal = with_log(story.log)
        async with client_of(gateway) as client:
            assert (await client.get("/metrics", headers={"Authorization": ""})).status_code == 401
            reader = bearer(gateway.settings, Scope.READ)
            assert (await client.get("/metrics", headers=reader)).status_code == 200


async def test_without_projections_the_process_still_has_its_metrics(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offline_gateway(tmp_path) as gateway:
        gateway.journal = with_log(story.log)

        def away() -> None:
            raise Unavailable("no answer")

        monkeypatch.setattr(gateway.store, "reading", away)
        async with client_of(gateway) as client:
            answer = await client.get("/metrics")
    assert answer.status_code == 200
    found = values(answer.text)
    assert found["unicron_projections_readable"] == 0
    assert found["process_resident_memory_bytes"] > 0
    assert "unicron_nodes state=ready" not in found
