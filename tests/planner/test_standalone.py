"""The stand-alone problem: its answer, its limits, from the command and over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidInput
from shared.planning import preparation
from shared.planning.compiled import cache_directory
from shared.planning.standalone import MAX_PROBLEM_BYTES, MAX_WORKERS, parse_problem, solve_standalone

ROOT = Path(__file__).resolve().parents[2]


def task(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "weight": 1.0,
        "necessary": 8,
        "current": 64,
        "faulted": False,
        "transition_s": 60,
        "throughput": {"8": 1.1e15, "16": 2.1e15},
        **fields,
    }


def problem(*tasks: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps(
        {"workers": 128, "workers_per_node": 8, "running_s": 86_400, "tasks": tasks or [task()], **fields}
    ).encode()


def test_the_answer_is_the_formula_s() -> None:
    faulted = task("b", faulted=True, current=16, weight=2.0, transition_s={"8": 30, "16": 10})
    answer = solve_standalone(parse_problem(problem(task(), faulted, workers=24)))
    assert answer.assignment == {"a": 8, "b": 16}
    first, second = answer.terms
    assert (first.reward, first.penalty) == (1.1e15 * 86_400, 0.0)  # 64 is not in its table: nothing is interrupted
    assert (second.reward, second.penalty) == (4.2e15 * 86_400, 4.2e15 * 10)
    assert answer.objective == first.objective + second.objective == answer.bound <= answer.relaxation
    assert answer.solve_s > 0


def test_a_move_that_the_map_does_not_name_costs_nothing() -> None:
    for transition, penalty in ((60, 60 * 2.1e15), ({"8": 5}, 5 * 2.1e15), ({}, 0.0)):
        item = task(current=16, transition_s=transition)
        (term,) = solve_standalone(parse_problem(problem(item, workers=8))).terms
        assert (term.workers, term.penalty) == (8, penalty)


def test_newcomers_cost_what_is_given() -> None:
    for fields, penalty in (
        ({}, 60 * 1.1e15),
        ({"staying": 15, "newcomers_s": 5}, 65 * 1.1e15),
        ({"staying": 16, "newcomers_s": 5}, 60 * 1.1e15),
        ({"staying": 8, "newcomers_s": 5, "transition_s": {"8": 1}}, 5 * 1.1e15),
        ({"staying": 8, "newcomers_s": 5, "transition_s": {"16": 1}}, 1.1e15),
    ):
        (term,) = solve_standalone(parse_problem(problem(task(current=8, **fields)))).terms
        assert (term.workers, term.penalty) == (16, penalty)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"throughput": {}}, "empty"),
        ({"necessary": 200, "throughput": {"200": 1e15}}, "needs at least 200 workers; there are 128"),
        ({"necessary": 17}, "no count of at least 17 workers"),
        ({"weight": 0}, "no count"),
        ({"throughput": {"8": 0}}, "no count"),
    ],
)
def test_a_task_that_cannot_run_gets_none_and_says_why(fields: dict[str, Any], reason: str) -> None:
    answer = solve_standalone(parse_problem(problem(task(**fields), task("b"))))
    assert answer.assignment == {"a": 0, "b": 16}
    assert reason in answer.terms[0].reason
    assert answer.terms[1].reason == ""


def test_a_task_without_workers_pays_its_transition() -> None:
    heavy = task("b", weight=9.0)
    (light, _) = solve_standalone(parse_problem(problem(task(current=8), heavy, workers=16))).terms
    assert (light.workers, light.reward, light.objective) == (0, 0.0, -1.1e15 * 60)
    assert "other tasks" in light.reason


WRONG = [float("nan"), float("inf"), -1, 1e12, "many", None]


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("workers", ()),
        ("running_s", ()),
        ("tasks.0.weight", ("weight",)),
        ("tasks.0.necessary", ("necessary",)),
        ("tasks.0.current", ("current",)),
        ("tasks.0.transition_s", ("transition_s",)),
        ("tasks.0.transition_s.8", ("transition_s", "8")),
        ("tasks.0.staying", ("staying",)),
        ("tasks.0.newcomers_s", ("newcomers_s",)),
        ("tasks.0.throughput.8", ("throughput", "8")),
    ],
)
def test_bad_numbers_are_refused_by_name(field: str, place: tuple[str, ...], value: object) -> None:
    item = task()
    fields: dict[str, Any] = {}
    match place:
        case ():
            fields[field] = value
        case (key,):
            item[key] = value
        case (key, count):
            item[key] = {count: value}
    if (value, place) in {(1e12, ("weight",)), (1e12, ("throughput", "8"))}:
        parse_problem(problem(item, **fields))  # large, and within the limits of these two
        return
    with pytest.raises(InvalidInput) as caught:
        parse_problem(problem(item, **fields))
    assert {error["field"] for error in caught.value.extra["errors"]} == {field}
    assert f"{field}: " in caught.value.detail
    json.dumps(caught.value.problem(), allow_nan=False)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (problem(tasks=[]), r"tasks: .*at least 1"),
        (problem(task(throughput={"1000000000000": 1.0})), r"throughput\.1000000000000: .*1000000"),
        (problem(task(throughput={"-8": 1.0})), r"throughput\.-8: .*1"),
        (problem(task(), task()), r"tasks\.1\.name: must differ"),
        (problem(task(speed=1)), r"tasks\.0\.speed: unknown field"),
        (b'{"workers": 8, "running_s": 1}', r"tasks: is missing"),
        (b"", "JSON"),
        (b"[]", r"\(problem\)"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "recursion|JSON"),
        (problem(task(weight=1e12, throughput={"8": 1e30}), running_s=1e10)[:-40], "JSON"),
    ],
)
def test_what_is_no_problem_is_refused(text: bytes, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        parse_problem(text)


@pytest.mark.timeout(300)  # compiles
def test_what_the_limits_allow_can_be_computed() -> None:
    item = task(weight=1e12, throughput={str(MAX_WORKERS): 1e30}, current=0)
    answer = solve_standalone(parse_problem(problem(item, workers=MAX_WORKERS, running_s=1e10)))
    assert answer.assignment == {"a": MAX_WORKERS}


def run(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli.main", "plan", "solve", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        input=stdin,
        capture_output=True,
        timeout=50,
        check=False,
    )


@pytest.mark.slow
def test_the_command_answers_in_json_and_in_words(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_bytes(problem())
    done = run(str(path), "-o", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["assignment"] == {"a": 16}
    assert answer["objective"] == answer["bound"]
    assert {"terms", "solve_s"} <= answer.keys()
    assert b"16" in run("-", stdin=problem()).stdout


def test_the_command_refuses_at_once(tmp_path: Path) -> None:
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(2**30)  # a hole: nothing is written, nothing may be read
    for path, code, words in (
        (big, 2, str(MAX_PROBLEM_BYTES)),
        (tmp_path / "none", 3, "no file"),
        (tmp_path, 2, "read"),
    ):
        done = run(str(path), "-o", "json")
        assert (done.returncode, done.stdout) == (code, b"")
        assert words in json.loads(done.stderr)["detail"]


def test_a_small_problem_loads_no_compiler() -> None:
    code = (
        "import sys; from shared.planning.standalone import *;"
        "solve_standalone(parse_problem(sys.stdin.buffer.read())); print('numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=problem(), capture_output=True, timeout=50, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == b"False"


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("change", ["note_prepared", pytest.param("compile_when_large", marks=pytest.mark.slow)])
def test_no_problem_waits_until_the_solver_is_compiled(change: str, tmp_path: Path) -> None:
    """But for the largest, which would take plain Python as long, and where nobody waits for an answer."""
    program = """
from shared.planning import compiled
assert compiled.namespace(compiled.PLAIN_UNTIL_COMPILED) is compiled.plain
compiled.{change}()
assert compiled.namespace(compiled.PLAIN_WORK) is compiled.plain
assert compiled.namespace(compiled.PLAIN_WORK + 1) is not compiled.plain
"""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    program = program.format(change=change)
    subprocess.run([sys.executable, "-P", "-c", program], env=env, check=True, timeout=60)


@pytest.mark.slow
def test_preparing_compiles_all_that_large_problems_need(tmp_path: Path) -> None:
    """It takes tens of seconds of a processor."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-P", "-m", preparation.__name__], env=env, check=True, timeout=300)
    kept = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert kept
    program = """
from benchmarks.planner import degenerate, problem
from shared.planning.solver import solve_with_alternatives
for posed in (problem(4096, 64), *(degenerate(shape, 256, 8) for shape in ("linear", "noise", "plateaus"))):
    solve_with_alternatives(posed)
"""
    subprocess.run([sys.executable, "-P", "-c", program], env=env, check=True, timeout=300)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == kept


def test_compiled_code_is_kept_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "unicron" / "numba"
    assert cache_directory().stat().st_mode & 0o077 == 0


def test_without_a_cache_folder_a_temporary_one_serves(unwritable: Path) -> None:
    assert cache_directory().parent == unwritable
    cache_directory().rmdir()
    (unwritable / f"unicron-numba-{os.getuid()}").write_text("someone put a file there")
    assert cache_directory().parent == unwritable
