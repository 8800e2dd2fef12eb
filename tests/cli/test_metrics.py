"""``unicron metrics``: what a script logs, by submission, and one submission beside another."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from services.api.task_metrics import collector
from shared.bus.connection import Bus
from shared.events.union import TaskStopped
from shared.log.journal import Journal
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.api.test_task_metrics import log
from tests.cli.conftest import call_unicron
from tests.cli.golden_outputs import COLUMNS, compare

VERBS = {
    "metrics": ("metrics", "gpt"),
    "metrics-against": ("metrics", "gpt", "--attempt", "2", "--against", "1"),
    "metrics-steps": ("metrics", "gpt", "grad_norm", "@loss", "--against", "1", "--points", "4"),
}
"""Name of the golden outputs -> the verb, and its arguments."""


@pytest.fixture
async def twice(
    settings: Settings, bus: Bus, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Server]:
    """The gateway over a task that was stopped at step 20 and submitted again, whose script logs three metrics."""
    monkeypatch.setattr(collector, "PATIENCE_S", 60.0)
    story = Story(settings.run_dir / "log.db")
    story.running()
    story.at(30).progress("gpt", 20, 1.0)
    story.at(40).add(TaskStopped, task="gpt", generation=1, step=20, path="/shared/gpt/step-20")
    story.at(50).submit()
    story.at(60).progress("gpt", 30, 0.5, generation=2)
    story.at(70).progress("gpt", 40, 0.25, generation=2)
    story.at(80).progress("gpt", 35, 0.5, generation=2)  # it went back to a checkpoint
    story.log.close()
    for step in range(1, 21):
        log(settings.run_dir, 1, "n0/0", 0, [step], grad_norm=40.0 / step, lr=1e-4 * step)
    for step in range(11, 41):
        log(settings.run_dir, 2, "n0/0", 0, [step], grad_norm=20.0 / step, lr=1e-4 * step)
    log(settings.run_dir, 2, "n0/0", 0, [40], validation_loss=float("nan"))
    async with serving(settings, bus, journal) as server:
        yield server


@pytest.mark.parametrize("columns", COLUMNS)
async def test_metrics_fit_the_width(twice: Server, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", str(columns))
    for name, arguments in VERBS.items():
        compare(name, columns, await call_unicron(*arguments, server=twice.url))


async def test_a_submission_is_shown_beside_another_one(twice: Server) -> None:
    shown = json.loads(
        (await call_unicron("metrics", "gpt", "lr", "--against", "1", "-o", "json", server=twice.url)).out
    )
    assert (shown["attempt"], shown["against"]["attempt"]) == (2, 1)
    assert [one["name"] for one in shown["series"]] == ["lr"]
    assert [point["step"] for point in shown["against"]["progress"]] == [11, 20]
    steps = (await call_unicron("metrics", "gpt", "grad_norm", "--against", "1", "--points", "1", server=twice.url)).out
    assert steps.splitlines()[1:3] == ["STEP  grad_norm  grad_norm OF 1", "40    0.5        2"]  # the newest by then
    past = (await call_unicron("metrics", "gpt", "@samples/s", "--attempt", "1", server=twice.url)).out
    assert past.splitlines()[0] == "gpt, submission 1 of 2"


async def test_what_there_is_not_is_said(twice: Server) -> None:
    unknown = await call_unicron("metrics", "gpt", "gradnorm", server=twice.url)
    assert (unknown.code, unknown.err) == (3, "unicron: no metric 'gradnorm'; did you mean 'grad_norm'?\n")
    assert (await call_unicron("metrics", "gpt", "--against", "3", server=twice.url)).code == 3
    assert (await call_unicron("metrics", "none", server=twice.url)).code == 3
