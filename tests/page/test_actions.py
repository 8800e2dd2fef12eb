"""What a user changes from the live page: a task's weight, and what is said about an incident (`make test-page`)."""

from __future__ import annotations

from typing import Any

import pytest

from shared.events.union import TaskStopped
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import Server, bearer
from tests.page.kit import MARKUP, PHONE, SCHEMES, Browser, browsing, event_types

pytestmark = pytest.mark.page

WEIGHT, ACKNOWLEDGE, NOTE = (
    "Change the weight of task gpt",
    "Acknowledge incident i1",
    "Add a note to incident i1",
)
"""Labels of the buttons."""

FIELDS = {WEIGHT: "#weight", ACKNOWLEDGE: None, NOTE: "#note"}
"""Button -> the field that the dialog has."""


async def ask(browser: Browser, label: str) -> None:
    """Press a button, and wait for its dialog."""
    await browser.page.get_by_role("button", name=label).click()
    await browser.page.locator("#confirm-dialog").wait_for(state="visible")


async def confirm(browser: Browser) -> None:
    await browser.page.locator("#confirm-yes").click()


@pytest.mark.parametrize("options", SCHEMES, ids=["light", "dark", "phone"])
async def test_axe_finds_no_violation_in_a_dialog(cluster: Server, options: dict[str, Any]) -> None:
    from axe_playwright_python.async_playwright import Axe

    async with browsing(cluster, **options) as browser:
        await browser.open()
        for label, field in FIELDS.items():
            await ask(browser, label)
            shown = await browser.page.locator("#confirm-dialog :is(input, textarea):visible").all()
            assert [f"#{await one.get_attribute('id')}" for one in shown] == ([field] if field else [])
            found = await Axe().run(browser.page)
            assert found.violations_count == 0, found.generate_report()
            if "viewport" in options:
                box = await browser.page.locator("#confirm-dialog").bounding_box()
                assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE["viewport"]["width"]
            await browser.page.keyboard.press("Escape")
        browser.check()


async def test_the_keyboard_changes_a_weight(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.page.get_by_role("button", name=WEIGHT).focus()
        await browser.page.keyboard.press("Enter")
        await browser.shows("#confirm-heading", "Change the weight of task gpt?")
        await browser.shows("#confirm-text", "It is 1 now")
        weight = browser.page.get_by_label("Weight", exact=True)
        assert await weight.input_value() == "1"
        await weight.fill("2.5")
        await browser.page.keyboard.press("Enter")
        await browser.shows("#message", "The weight of task gpt is changed.")
        await browser.shows("#task-rows td", "2.5")
        assert (await cluster.http.get("/v1/tasks/gpt")).json()["weight"] == 2.5
        assert (await event_types(cluster)).count("task.changed") == 1
        browser.check()


async def test_a_weight_that_another_has_changed_is_shown_before_it_is_overruled(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await ask(browser, WEIGHT)
        assert (await cluster.http.patch("/v1/tasks/gpt", json={"weight": 3})).status_code == 200
        await browser.page.locator("#weight").fill("2")
        await confirm(browser)
        await browser.shows("#confirm-problem", "has changed since it was read")
        await browser.shows("#confirm-text", "It is 3 now")
        assert (await cluster.http.get("/v1/tasks/gpt")).json()["weight"] == 3
        await confirm(browser)
        await browser.shows("#message", "The weight of task gpt is changed.")
        assert (await cluster.http.get("/v1/tasks/gpt")).json()["weight"] == 2


async def test_a_wrong_weight_is_refused_with_the_reason(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await ask(browser, WEIGHT)
        await browser.page.locator("#weight").fill("0")
        await confirm(browser)
        await browser.shows("#confirm-problem", "greater than 0")
        assert "task.changed" not in await event_types(cluster)


async def test_an_incident_is_acknowledged_once(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await ask(browser, ACKNOWLEDGE)
        await browser.page.locator("#confirm-no").click()
        await browser.page.locator("#confirm-dialog").wait_for(state="hidden")
        await ask(browser, ACKNOWLEDGE)
        await confirm(browser)
        await browser.shows("#message", "Incident i1 is acknowledged.")
        await browser.shows("#incident-rows td", "acknowledged by uid/")
        await browser.page.get_by_role("button", name=ACKNOWLEDGE).wait_for(state="detached")
        assert (await event_types(cluster)).count("incident.acknowledged") == 1
        browser.check()


async def test_a_note_is_shown_as_it_was_written(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await ask(browser, NOTE)
        await confirm(browser)  # an empty one is not sent
        assert await browser.page.locator("#confirm-dialog").is_visible()
        note = browser.page.get_by_label("Note, for everybody")
        await note.fill(MARKUP)
        await confirm(browser)
        await browser.shows("#message", "The note was added to incident i1.")
        await browser.shows("#incident-rows td", "note by uid/")
        await browser.shows("#incident-rows td", MARKUP)
        await ask(browser, NOTE)
        assert await note.input_value() == ""
        await note.fill("the switch of rack 4")
        await confirm(browser)
        await browser.shows("#incident-rows td", "last of 2 notes")
        notes = (await cluster.http.get("/v1/incidents/i1")).json()["notes"]
        assert [one["text"] for one in notes] == [MARKUP, "the switch of rack 4"]
        browser.check()


async def test_a_task_that_was_stopped_is_resumed_and_deleted_on_its_page(cluster: Server) -> None:
    await cluster.append(TaskStopped, task="gpt", generation=3, step=95, path="/step-95")
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.page.locator("#task-rows a", has_text="gpt").click()
        await browser.shows("#tasks-heading", "Task gpt")
        await ask(browser, "Resume task gpt")
        await confirm(browser)
        await browser.shows("#message", "Task gpt goes on.")
        assert "task.submitted" in (await event_types(cluster))[-3:]
        await cluster.append(TaskStopped, task="gpt", generation=0, step=95, path="/step-95")
        await ask(browser, "Delete task gpt")
        await confirm(browser)
        await browser.shows("#message", "Task gpt is deleted.")
        assert (await event_types(cluster))[-1] == "task.deleted"
        await browser.shows("#task-rows", "it is in no list")
        assert not await browser.page.get_by_role("button", name="Delete task gpt").count()
        browser.check()


async def buttons(browser: Browser) -> set[str]:
    """Return the labels of the buttons that are offered, once all parts of the page are shown."""
    await browser.open()
    await browser.shows("#task-rows", "gpt")
    await browser.shows("#incident-rows", "process-exit")
    await browser.open_node("n2")
    found = await browser.page.locator("main button:not(.cell):visible").all()
    return {await one.get_attribute("aria-label") or await one.inner_text() for one in found}


COPY, CLOSE = "Copy the id i1", "Close"
OFFERED = {
    Scope.READ: {COPY, CLOSE},
    Scope.SUBMIT: {COPY, CLOSE, "Submit a task", ACKNOWLEDGE, NOTE},
    Scope.OPERATE: {
        COPY, CLOSE, "Submit a task", ACKNOWLEDGE, NOTE, WEIGHT, "Stop task gpt",
        "Return node n2",
    },
}  # fmt: skip


@pytest.mark.parametrize("scope", OFFERED)
async def test_what_is_offered_is_what_the_session_may_do(cluster: Server, settings: Settings, scope: Scope) -> None:
    async with browsing(cluster) as browser:
        headers = bearer(settings, scope)
        await browser.page.set_extra_http_headers(headers)
        assert await buttons(browser) == OFFERED[scope]
        if scope is Scope.SUBMIT:
            own = await cluster.http.post("/v1/tasks", json=cluster.spec("own"), headers=headers)
            assert own.status_code == 201
            await browser.page.get_by_role("button", name="Change the weight of task own").wait_for()
            assert await buttons(browser) == {*OFFERED[scope], "Change the weight of task own", "Stop task own"}
        browser.check()
