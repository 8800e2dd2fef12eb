"""What is said of names that are not known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.errors import InvalidInput
from shared.planning.standalone import StandaloneProblem
from shared.settings.model import Settings, slips
from shared.tasks.specification import MOST_REPORTED, load_spec
from shared.unknown_names import nearest, unknown_field_of

TEXTS = {".py", ".md", ".yml", ".yaml", ".service", ".sbatch"}
ROOT = Path(__file__).resolve().parents[2]

SPEC = """
name: gpt
model: {layers: 2, hidden: 64, heads: 4, sequence_length: 64}
batch: {global: 8}
steps: 5
data: corpus.txt
"""


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    [
        (
            "wieght: 2",
            "wieght",
            "unknown field; did you mean 'weight'? allowed: name, model, batch, steps, data, weight, ",
        ),
        ("workers: {mim: 2}", "workers.mim", "unknown field; did you mean 'min'? allowed: min, max"),
        ("workers: {least: 2}", "workers.least", "unknown field; allowed: min, max"),
        (
            "checkpoint: {evry: 2}",
            "checkpoint.evry",
            "unknown field; did you mean 'every'? allowed: directory, url, every, ",
        ),
    ],
)
def test_an_unknown_field_of_a_specification_names_the_nearest_and_the_allowed_of_its_place(
    line: str, field: str, problem: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        load_spec(f"{SPEC}{line}\n")
    (error,) = refused.value.extra["errors"]
    assert error["field"] == field
    assert error["problem"].startswith(problem)


def test_the_name_in_the_file_is_proposed_and_not_that_in_the_program() -> None:
    with pytest.raises(
        InvalidInput, match=r"batch\.globl: unknown field; did you mean 'global'\? allowed: global, micro"
    ):
        load_spec(SPEC.replace("{global: 8}", "{global: 8, globl: 8}"))


def test_an_error_of_many_fields_stays_short() -> None:
    with pytest.raises(InvalidInput) as refused:
        load_spec(SPEC + "".join(f"weight{number}: 1\n" for number in range(1000)))
    assert len(refused.value.extra["errors"]) == MOST_REPORTED


def test_the_place_of_a_field_is_found_in_lists_and_maps() -> None:
    text = unknown_field_of(StandaloneProblem, ("tasks", 0, "wieght"))
    assert text.startswith("unknown field; did you mean 'weight'? allowed: ")


def test_nothing_is_proposed_for_what_is_like_nothing_or_no_name() -> None:
    assert nearest("gtp", ["gpt", "bert"]) == "; did you mean 'gpt'?"
    assert nearest("x", ["gpt", "bert"]) == ""
    assert nearest("gpt" * 100_000, ["gpt" * 100_000 + "x"]) == ""


def test_a_variable_that_is_nearly_a_setting_is_a_slip() -> None:
    environment = ["UNICRON_HEARTBEAT_INTERVAL", "UNICRON_RUN_DIR", "UNICRON_RUNDIR", "UNICRON_TOKEN", "RUN_DIR"]
    assert [*slips(environment, Settings.model_fields)] == [
        ("UNICRON_HEARTBEAT_INTERVAL", "UNICRON_HEARTBEAT_INTERVAL_S"),
        ("UNICRON_RUNDIR", "UNICRON_RUN_DIR"),
    ]


def test_no_variable_that_the_project_names_is_taken_for_a_slip() -> None:
    folders = ("cli", "services", "shared", "unicron", "unicron_client", "deploy", "docs")
    texts = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    names = {name for text in texts for name in re.findall(r"UNICRON_[A-Z_]*[A-Z]", text)}
    assert len(names) > 50
    assert [*slips(names, Settings.model_fields)] == []
