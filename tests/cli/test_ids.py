"""The beginning of an id in the place of the id, and commands that are printed to be typed next."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator

import pytest

from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.cli.conftest import call_unicron


@pytest.fixture
async def two_incidents(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over two incidents with ids that begin alike, and one whose id is the beginning of both."""
    story = Story(settings.run_dir / "log.db")
    story.running().process_exit("abc-1", "p1").process_restored("abc-1", "p1")
    for seconds, name in ((200, "abc-2"), (210, "ab"), (220, "Abc")):
        story.at(seconds).error(name, seconds - 1, task="gpt", node="n1", worker="n1/1", rank=3, generation=3, step=95)
    story.log.close()
    async with serving(settings, bus, journal) as server:
        yield server


async def test_a_beginning_is_enough_where_only_one_id_has_it(two_incidents: Server) -> None:
    for typed, meant in (("abc-2", "abc-2"), ("ab", "ab"), ("A", "Abc")):
        for verb in (("incidents", "show"), ("incidents",), ("postmortem",)):
            shown = await call_unicron(*verb, typed, "-o", "json", server=two_incidents.url)
            document = json.loads(shown.out)
            assert document.get("id", document.get("incident", {}) and document["incident"]["id"]) == meant
    plan = await call_unicron("plan", "show", "st", "-o", "json", server=two_incidents.url)
    assert json.loads(plan.out)["id"] == "start"


async def test_an_ambiguous_beginning_names_the_candidates(two_incidents: Server) -> None:
    for verb in (("incidents", "show"), ("postmortem",)):
        refused = await call_unicron(*verb, "abc", "-o", "json", server=two_incidents.url)
        assert (refused.code, refused.out) == (2, "")
        problem = json.loads(refused.err)
        assert problem["detail"] == "INCIDENT: 'abc' is the beginning of several: abc-1, abc-2"
        assert problem["errors"][0]["value"] == "abc"
    unknown = await call_unicron("plan", "show", "zz", server=two_incidents.url)
    assert (unknown.code, unknown.out) == (3, "")


async def test_the_interface_lists_ids_by_their_beginning(two_incidents: Server) -> None:
    async def ids(**asked: str | int) -> object:
        return (await two_incidents.http.get("/v1/ids", params=asked)).json()

    assert await ids(kind="incident", prefix="ab") == {"ids": ["ab", "abc-1", "abc-2"], "more": False}
    assert await ids(kind="incident", prefix="ab", limit=1) == {"ids": ["ab"], "more": True}
    assert await ids(kind="incident", prefix="a%") == {"ids": [], "more": False}
    assert await ids(kind="node", prefix="n") == {"ids": ["n0", "n1"], "more": False}
    assert await ids(kind="task") == {"ids": ["gpt"], "more": False}
    refused = await two_incidents.http.get("/v1/ids", params={"kind": "incident", "prefix": "\0"})
    assert refused.status_code == 422


async def test_the_commands_of_an_incident_can_be_typed(two_incidents: Server) -> None:
    shown = await call_unicron("incidents", "show", "abc-1", server=two_incidents.url)
    assert (shown.code, shown.err) == (0, "")
    typed = [line.split("  ")[0] for line in shown.out.partition("NEXT")[2].splitlines()[1:]]
    assert [line.split()[1] for line in typed] == ["postmortem", "plan", "show", "logs", "nodes", "events"]
    for line in typed:
        outcome = await call_unicron(*shlex.split(line)[1:], server=two_incidents.url)
        assert outcome.code == 0
        assert outcome.out or "logs" in line
