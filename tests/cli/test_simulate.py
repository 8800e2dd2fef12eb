"""``unicron simulate`` from end to end: a small trace in a file, all policies."""

from __future__ import annotations

import io
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.main import main
from cli.planning.simulate import command_line
from shared.costs.ledger import CATEGORIES
from simulator.policies import POLICIES
from simulator.report.summary import ORACLE
from tests.cli.conftest import Outcome
from tests.simulator.report_kit import spec

NAMES = [
    "megatron", "megatron-spares", "varuna", "bamboo", "oobleck", "recycle", "torchft", "byterobust", "unicron-paper",
    "unicron", "oracle",
]  # fmt: skip
"""As users know them."""

TRACE = """\
# horizon_s: 86400
time_s,node,event,kind
0,n0,up,
0,n1,up,
0,n2,up,
0,n3,up,
3600,n1,error,exception
7200,n2,error,connection
14400,n3,down,ECC errors
43200,n3,up,
"""
"""A day of four nodes: 32 workers, on which some of the paper's six tasks fit."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text(TRACE)
    return path


def unicron(*arguments: object) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(each) for each in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def simulate(*arguments: object) -> Outcome:
    return unicron("simulate", *arguments)


def document(*arguments: object) -> dict[str, Any]:
    outcome = simulate(*arguments, "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    found: dict[str, Any] = json.loads(outcome.out.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_trace_file_and_nothing_else_compares_all_policies(trace: Path) -> None:
    # In this process: the next test has several, each of which would load the compiled kernels, or compile them.
    found = document("--trace", trace, "--policy", "all", "--jobs", 1)
    assert found.keys() == {"trace", "seeds", "policies", "wall_s"}
    assert (found["trace"], found["seeds"]) == ("small", 1)
    assert found["wall_s"] > 0
    assert [line["name"] for line in found["policies"]] == NAMES
    by_name = {line["name"]: line for line in found["policies"]}
    bound = by_name["oracle"]["accumulated_waf_flop"]
    for name, line in by_name.items():
        assert line.keys() == {
            "name", "accumulated_waf_flop", "ratio_to_megatron", "ratio_to_oracle", "interval", "worker_s",
            "transitions", "recovery_p50_s", "recovery_p99_s",
        }  # fmt: skip
        value = line["accumulated_waf_flop"]
        assert 0 < value <= bound * (1 + 1e-9)
        assert line["interval"] == [value, value], "one seed"
        assert line["ratio_to_oracle"] == pytest.approx(value / bound)
        assert line["ratio_to_megatron"] == pytest.approx(value / by_name["megatron"]["accumulated_waf_flop"])
        if name == "oracle":
            continue
        assert line["worker_s"].keys() == set(CATEGORIES.values())
        assert sum(line["worker_s"].values()) == pytest.approx(4 * 8 * 86_400, rel=1e-6)
        assert line["transitions"] >= 3
        assert 0 < line["recovery_p50_s"] <= line["recovery_p99_s"]


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing_but_the_time(trace: Path) -> None:
    arguments = ("--trace", trace, "--policy", "megatron,unicron,oracle", "--seeds", 3)
    one, two = (document(*arguments, "--jobs", jobs) for jobs in (1, 2))
    assert [line["name"] for line in one["policies"]] == ["megatron", "unicron", "oracle"]
    assert {**one, "wall_s": 0} == {**two, "wall_s": 0}
    assert one["seeds"] == 3


@pytest.mark.slow
def test_seeds_of_a_generated_trace_differ(tmp_path: Path) -> None:
    arguments = ("--trace", "fig3", "--policy", "unicron")
    both = document(*arguments, "--seeds", 2)["policies"][0]
    each = [document(*arguments, "--first-seed", seed)["policies"][0]["accumulated_waf_flop"] for seed in (0, 1)]
    assert each[0] != each[1]
    assert both["accumulated_waf_flop"] == pytest.approx(sum(each) / 2)
    assert both["interval"][0] < min(each) < max(each) < both["interval"][1]


def test_the_log_of_each_run_is_verified_by_replay(trace: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    document("--trace", trace, "--policy", "varuna,unicron,oracle", "--log", logs, "--jobs", 1)
    assert sorted(path.name for path in logs.glob("*.db")) == ["unicron-0.db", "varuna-0.db"]
    for path in logs.glob("*.db"):
        outcome = unicron("replay", path, "--verify", "-o", "json")
        assert (outcome.code, outcome.err) == (0, "")
        report = json.loads(outcome.out)
        assert report["mismatches"] == []
        assert report["verified"] == report["plans"] > 0
    again = simulate("--trace", trace, "--policy", "unicron", "--log", logs)
    assert (again.code, again.out) == (4, "")
    assert "exists" in again.err


def test_a_log_is_a_trace(trace: Path, tmp_path: Path) -> None:
    tasks, logs = tmp_path / "tasks.yaml", tmp_path / "logs"
    specs = [spec(name).model_dump(mode="json", by_alias=True, exclude_unset=True) for name in ("gpt-a", "gpt-b")]
    tasks.write_text(yaml.safe_dump_all(specs))
    recorded = ("--trace", trace, "--tasks", tasks, "--policy", "unicron", "--log", logs, "--jobs", 1)
    (before,) = document(*recorded)["policies"]
    found = document("--trace", logs / "unicron-0.db", "--policy", "megatron,unicron", "--jobs", 1)
    assert found["trace"] == "unicron-0.db"
    megatron, after = found["policies"]
    assert after["accumulated_waf_flop"] == pytest.approx(before["accumulated_waf_flop"], rel=0.01)
    assert 0 < megatron["accumulated_waf_flop"] < after["accumulated_waf_flop"]


@pytest.mark.slow
def test_the_table_fits_a_terminal(trace: Path) -> None:
    outcome = simulate("--trace", trace, "--jobs", 1)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in NAMES)


@pytest.mark.slow
def test_the_page_is_written_to_a_file_and_plots_to_theirs(trace: Path, tmp_path: Path) -> None:
    page, plots = tmp_path / "page.html", tmp_path / "plots"
    options = ("-o", "html", "--output-file", page, "--plots", plots, "--plot-format", "png")
    outcome = simulate("--trace", trace, "--policy", "unicron,oracle", "--jobs", 1, *options)
    assert outcome == Outcome(0, "", "")
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.endswith("</html>\n")
    assert POLICIES["unicron"].assumptions[0][:20] in text or not POLICIES["unicron"].assumptions
    assert {path.name for path in plots.iterdir()} == {"trace.png", "waf.png", "accumulated-waf.png", "cost.png"}


def test_the_registry_has_the_names_that_users_know() -> None:
    assert [*POLICIES, ORACLE] == NAMES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "no-such"], ["policy", "no-such", "megatron"]),
        (["--policy", "unicron,unicron"], ["policy", "twice"]),
        (["--case", "6"], ["--case", "5"]),
        (["--seeds", "0"], ["--seeds"]),
        (["--cluster", "no-such.yaml"], ["no-such.yaml"]),
    ],
)
def test_wrong_options_are_named(trace: Path, arguments: list[str], words: list[str]) -> None:
    outcome = simulate("--trace", trace, *arguments)
    assert (outcome.code in {2, 3}, outcome.out) == (True, "")
    assert [word for word in words if word not in outcome.err] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["without events"]),
        ("time_s,node,event,kind\n0,n0,explodes,\n", ["2", "event", "explodes", "down"]),
        ("time_s,node,event,kind\n-1,n0,up,\n", ["2", "time_s", "-1"]),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    outcome = simulate("--trace", path, "-o", "json")
    assert (outcome.code, outcome.out) == (2, "")
    problem = json.loads(outcome.err)
    assert problem["code"] == "invalid-input"
    assert [word for word in words if word not in problem["detail"]] == []


def test_a_trace_that_is_not_there_is_not_found() -> None:
    outcome = simulate("--trace", "no-such.csv")
    assert (outcome.code, outcome.out) == (3, "")
    assert "no-such.csv" in outcome.err


def test_the_command_names_what_was_given() -> None:
    text = command_line(
        trace="a file.csv",
        cluster=None,
        tasks=Path("t.yaml"),
        policy="all",
        seeds=3,
        first_seed=0,
        case=1,
        output="html",
    )
    assert shlex.split(text) == [
        "unicron", "simulate", "--trace", "a file.csv", "--tasks", "t.yaml", "--output", "html", "--seeds", "3",
    ]  # fmt: skip
