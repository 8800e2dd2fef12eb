"""The events of a log that was cut over: those that were archived come from their segments."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from shared.archive.cutover import cut
from shared.archive.writing import archive
from shared.bus.connection import Bus
from shared.log.archived import verified_base
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.settings.model import Settings
from tests.api.kit import Story, serving


async def test_archived_events_are_served_from_segments_or_said_to_be_away(
    settings: Settings, bus: Bus, story: Story, tmp_path: Path
) -> None:
    events = [record.event for record in story.running().log.read_all()]
    url, folder = settings.log_database_url, tmp_path / "segments"
    with closing(EventLog(url)) as log:
        for event in events:
            log.append([event])
        archive(log, folder, 5)
    cut(url, verified_base(folder, 4))
    with closing(EventLog(url)) as log:
        async with Journal(log, bus) as journal, serving(settings, bus, journal) as server:
            page = (await server.http.get("/v1/events", params={"limit": 1000})).json()
            assert [item["position"] for item in page["items"]] == list(range(1, len(events) + 1))
            assert (await server.http.get("/v1/tasks/gpt")).json()["state"] == "running"
            joined = [n for n, event in enumerate(events, 1) if event.type == "node.joined"]
            for last in (0, 1, 2, 9):  # of the archived ones, too
                asked = {"type": "node.joined", "last": last}
                items = (await server.http.get("/v1/events", params=asked)).json()["items"]
                assert [item["position"] for item in items] == joined[len(joined) - min(last, len(joined)) :]
    folder.rename(tmp_path / "away")
    with closing(EventLog(url)) as log:
        async with Journal(log, bus) as journal, serving(settings, bus, journal) as server:
            assert (await server.http.get("/v1/tasks/gpt")).json()["state"] == "running"  # projections were kept
            behind = (await server.http.get("/v1/events", params={"after": 4})).json()["items"]
            assert [item["position"] for item in behind] == list(range(5, len(events) + 1))
            for query in ("after=3", "follow=true&after=3"):
                answer = await server.http.get(f"/v1/events?{query}")
                assert (answer.status_code, answer.json()["code"]) == (404, "archived")
                assert "UNICRON_LOG_SEGMENTS" in answer.json()["detail"]
