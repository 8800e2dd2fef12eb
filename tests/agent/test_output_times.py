"""The notes of how much output there was by when, and the output since a time that follows from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.agent.ranks.output_limits import OutputTimes
from shared.machine.output_times import EVERY_S, MOST_BYTES, size_at, times_path
from shared.messages.node_files import ReadOutput
from shared.messages.task_folders import TaskFolders

START_S = 1_700_000_000.0


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "tasks" / "gpt" / "output" / "1-n0-0.log"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def printed(output: Path, times: OutputTimes, text: str, at_s: float) -> None:
    """Print a text, after which the agent looks."""
    with output.open("a") as file:
        file.write(text)
    times.note([output], at_s)


def since(output: Path, at_s: float) -> str:
    folders = TaskFolders(output.parents[3])
    request = ReadOutput(task="gpt", generation=1, worker="n0/0", offset=0, since_s=at_s)
    return folders.answer(request)[1].decode()


def test_output_since_a_time_begins_with_a_whole_line(output: Path) -> None:
    times = OutputTimes()
    times.note([output], START_S)
    printed(output, times, "one\n", START_S + 10)
    printed(output, times, "two\nthr", START_S + 20)
    times.note([output], START_S + 300)  # a silence
    printed(output, times, "ee\nfour\n", START_S + 301)
    assert since(output, START_S) == "one\ntwo\nthree\nfour\n"
    assert since(output, START_S + 12) == "two\nthree\nfour\n"
    assert since(output, START_S + 299) == "four\n"
    os.utime(output, (START_S + 301, START_S + 301))
    assert since(output, START_S + 302) == ""


def test_sizes_are_noted_now_and_then_and_by_the_next_agent_too(output: Path) -> None:
    times = OutputTimes()
    for tenth in range(200):
        printed(output, times, "line\n", START_S + tenth / 10)
    noted = times_path(output).read_bytes().splitlines()
    assert len(noted) == 20 / EVERY_S
    printed(output, OutputTimes(), "line\n", START_S + 20)
    assert len(times_path(output).read_bytes().splitlines()) == len(noted) + 1
    OutputTimes().note([output], START_S + 1000)
    assert len(times_path(output).read_bytes().splitlines()) == len(noted) + 1, "nothing was printed"


def test_output_that_was_emptied_since_then_is_new(output: Path) -> None:
    times = OutputTimes()
    printed(output, times, "old\n" * 10, START_S)
    output.write_text("")
    printed(output, times, "new\n", START_S + 10)
    assert since(output, START_S + 5) == "new\n"
    assert since(output, START_S + 10) == ""


def test_what_an_older_agent_ran_has_no_notes_and_comes_whole(output: Path) -> None:
    output.write_text("one\n")
    assert since(output, START_S) == "one\n"


@pytest.mark.parametrize("lines", [[], [b"", b"x y", b"1 2 3"]])
def test_what_is_no_note_says_nothing(lines: list[bytes]) -> None:
    assert size_at(lines, START_S) is None


def test_a_link_in_the_place_of_the_notes_is_left_alone(output: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("1")
    times_path(output).symlink_to(other)
    printed(output, OutputTimes(), "one\n", START_S)
    times_path(output).unlink()
    os.link(other, times_path(output))
    printed(output, OutputTimes(), "two\n", START_S + 10)
    assert other.read_text() == "1"
    assert other.stat().st_size < MOST_BYTES
