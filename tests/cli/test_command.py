"""The command itself: verbs, usage, exit codes without a server."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.interrupt import INTERRUPTED
from cli.main import VERBS, load, main, wants_json
from shared.errors import UnicronError
from tests.cli.conftest import call_unicron, run_unicron
from tests.cli.test_simulate import TRACE

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"

HEAVY = (
    "httpx",
    "pydantic",
    "fastapi",
    "nats",
    "sqlalchemy",
    "torch",
    "yaml",
    "cli.stack.up",
    "cli.demo.verb",
    "cli.tasks.submit",
)
"""What listing the verbs must not import: it would take longer than the answer."""


def test_help_imports_no_verb_and_nothing_heavy() -> None:
    code = (
        "import sys; from cli.main import main; main(['--help']);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.strip() == "[]"
    assert all(f" {verb} " in done.stdout for verb in VERBS)


GROUPS = {
    "plan": ["list", "show", "solve", "throughput"],
    "agent": ["restart"],
    "incidents": ["acknowledge", "note", "show"],
    "token": ["add", "list", "remove"],
    "node": ["add", "remove"],
    "keys": ["make", "tls"],
    "watch": ["cloud", "kubernetes", "machine", "slurm"],
}
"""Verbs that have verbs of their own."""


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_can_be_loaded_and_takes_output_formats(verb: str) -> None:
    command = load(verb)
    assert command.name == verb
    if verb in GROUPS:
        assert sorted(command.commands) == GROUPS[verb]
    for one in command.commands.values() if verb in GROUPS else [command]:
        options = [option for parameter in one.params for option in parameter.opts]
        assert {"--output", "-o"} <= set(options) or verb in {"up", "control"}


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in {"plan", "up", "demo", "replay"}])
def test_the_line_in_the_list_is_that_of_the_verb(verb: str) -> None:
    assert load(verb).help.splitlines()[0] == VERBS[verb][1]


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_a_verb_can_be_typed(verb: str) -> None:
    program, first, *words = shlex.split(VERBS[verb][2])
    assert (program, first) == ("unicron", verb)
    command = load(verb)
    if words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    command.make_context(verb, words)  # refuses what it does not know, or lacks


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ps", "-o", "json"], True),
        (["ps", "-ojson"], True),
        (["ps", "--output=json"], True),
        (["ps", "--output", "json"], True),
        (["ps", "-o", "text"], False),
        (["show", "json"], False),
        ([], False),
    ],
)
def test_errors_know_the_format_before_parsing(arguments: list[str], expected: bool) -> None:
    assert wants_json(arguments) is expected


@pytest.mark.parametrize("arguments", [["--no-such"], ["no-verb"], ["ps", "--colour"], ["show"], ["ps", "-o", "xml"]])
async def test_wrong_usage_exits_2_with_a_sentence(arguments: list[str]) -> None:
    outcome = await call_unicron(*arguments, server="http://127.0.0.1:9")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("unicron: ")
    assert "Traceback" not in outcome.err


@pytest.mark.slow
async def test_settings_that_contradict_one_another_exit_2_with_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNICRON_COMMAND_TIMEOUT_S", "400")
    outcome = await run_unicron("up", "--run-dir", str(tmp_path), "--port", "0")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("unicron: settings refused: command_timeout_s: must be less than resume_timeout_s")
    assert os.listdir(tmp_path) == [], "nothing was started"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("unicron ")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["ps", "--help"]])
def test_a_reader_that_has_ended_is_no_error(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "cli.main", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_the_operators_page_have_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def codes(kind: type[UnicronError]) -> set[int]:
        return {kind.exit_code}.union(*(codes(child) for child in kind.__subclasses__()))

    expected = sorted({0, INTERRUPTED, *codes(UnicronError)})
    table = OPERATIONS.read_text().partition("## Exit status")[2].partition("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == expected
    assert main(["--help"]) == 0
    text = capsys.readouterr().out.partition("Exit status:")[2].partition("docs/operations.md")[0]
    assert [int(code) for code in re.findall(r"\d+", text)] == expected


async def test_a_server_that_is_not_there_exits_5_with_a_hint() -> None:
    outcome = await call_unicron("ps", server="http://127.0.0.1:9")
    assert (outcome.code, outcome.out) == (5, "")
    assert "unicron up" in outcome.err
    assert "UNICRON_SERVER" in outcome.err
    outcome = await run_unicron("ps", "-o", "json", server="http://127.0.0.1:9")
    assert (outcome.code, outcome.out) == (5, "")
    assert json.loads(outcome.err)["code"] == "unavailable"


@pytest.mark.parametrize("server", ["nonsense", "ftp://x", "http://", "http://[::1"])
async def test_an_address_that_is_none_exits_2(server: str) -> None:
    outcome = await call_unicron("ps", server=server)
    assert outcome.code == 2
    assert "--server" in outcome.err


async def test_an_unknown_verb_and_an_unknown_option_name_the_nearest() -> None:
    for arguments, near in ((["sumbit"], "'submit'"), (["plan", "shwo"], "'show'"), (["ps", "--stat"], "--state")):
        outcome = await run_unicron(*arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert near in outcome.err


def small_simulation(folder: Path) -> tuple[str, ...]:
    """Return the verb with a short trace, and nothing that it would write."""
    trace = folder / "small.csv"
    trace.write_text(TRACE)
    return ("simulate", "--trace", str(trace), "--jobs", "1")


@pytest.mark.parametrize(
    "option",
    [pytest.param("--output-file", marks=pytest.mark.slow), "--log", pytest.param("--plots", marks=pytest.mark.slow)],
)
def test_a_path_that_cannot_be_used_is_one_sentence(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    assert main([*small_simulation(tmp_path), option, str(below)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "file") in said


@pytest.mark.parametrize("verb", ["up", "demo"])
def test_a_run_directory_that_cannot_be_made_is_one_sentence(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    run_dir = tmp_path / "file" / "run"
    assert main([verb, "--run-dir", str(run_dir)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (str(run_dir) in said, said.endswith("Not a directory")) == (True, True)


def test_a_port_that_is_taken_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["up", "--run-dir", str(tmp_path / "run"), "--port", str(port)]) == 5
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "nats").exists()
