"""Verbs that change a task, and those that say something about an incident."""

from __future__ import annotations

import json

import pytest

from cli.tasks.change import merge_patch
from shared.errors import InvalidInput
from shared.events.union import TaskStopped
from tests.api.kit import Server
from tests.cli.conftest import Unicron, call_unicron


async def test_a_task_is_changed_deleted_and_resumed(api: Server, unicron: Unicron) -> None:
    await api.http.post("/v1/tasks", json=api.spec(workers={"min": 1, "max": 4}))
    changed = await unicron("change", "gpt", "--weight", "2.5", "--max", "any", "--min", "2")
    assert (changed.code, changed.out, changed.err) == (0, "gpt: weight 2.5, 2 to any workers\n", "")
    as_json = await unicron("change", "gpt", "--max", "3", "-o", "json")
    assert json.loads(as_json.out)["spec"]["workers"] == {"min": 2, "max": 3}
    refused = await unicron("change", "gpt", "--weight", "-1")
    assert (refused.code, refused.out) == (2, "")
    assert "weight" in refused.err
    assert (await unicron("resume", "gpt")).code == 4
    assert (await unicron("delete", "gpt")).code == 4
    recorded = await api.append(TaskStopped, task="gpt", generation=1, step=40, path="/c40")
    await api.projected(recorded.position)
    deleted = await unicron("delete", "gpt")
    assert (deleted.code, deleted.out) == (0, "gpt: deleted; its checkpoint stays: /c40\n")
    assert "gpt" not in (await unicron("ps")).out
    resumed = await unicron("resume", "gpt")
    assert (resumed.code, resumed.out) == (0, "gpt: pending, goes on from step 40\n")
    assert "gpt" in (await unicron("ps")).out


async def test_an_incident_is_acknowledged_and_noted(healed: Server) -> None:
    said = await call_unicron("incidents", "acknowledge", "i1", server=healed.url)
    assert said.out.startswith("acknowledged by uid/")
    noted = await call_unicron("incidents", "note", "i1", "a \x1b[2J switch", server=healed.url)
    assert (noted.code, noted.out) == (0, "i1: noted, 1 in all\n")
    shown = await call_unicron("incidents", "i1", server=healed.url)
    assert shown.out == (await call_unicron("incidents", "show", "i1", server=healed.url)).out
    assert "acknowledged by uid/" in shown.out
    assert "a \N{REPLACEMENT CHARACTER}[2J switch\n" in shown.out
    assert (await call_unicron("incidents", "note", "i9", "x", server=healed.url)).code == 3
    listed = json.loads((await call_unicron("incidents", "-o", "json", server=healed.url)).out)
    assert [len(item["notes"]) for item in listed["items"] if item["id"] == "i1"] == [1]
    # Options before the verb hold for it, too.
    as_json = await call_unicron("incidents", "-o", "json", "i1", server=healed.url)
    assert json.loads(as_json.out)["id"] == "i1"


def test_the_options_of_a_change_are_a_merge_patch() -> None:
    assert merge_patch(2.0, None, None) == {"weight": 2.0}
    assert merge_patch(None, 1, "any") == {"workers": {"min": 1, "max": None}}
    assert merge_patch(None, None, "4") == {"workers": {"max": 4}}
    for most in ("none", "-1", "1.5", ""):
        with pytest.raises(InvalidInput, match="must be a number or any"):
            merge_patch(None, None, most)
    with pytest.raises(InvalidInput, match="nothing to change"):
        merge_patch(None, None, None)
