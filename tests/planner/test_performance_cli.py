"""``throughput`` as a command of its own; the program registers it as ``unicron plan throughput``."""

import json

import pytest
import typer
from typer.testing import CliRunner

from shared.errors import InvalidInput

SIZES = (
    "--layers 96 --hidden 12288 --heads 96 --sequence-length 2048 --vocabulary 51200 --global-batch 1536 "
    "--hardware a100-80 --workers 768"
).split()
LAYOUT = (
    "--tensor 8 --pipeline 12 --micro-batch 1 --recompute full --interleave 1 --no-sequence-parallel "
    "--no-distributed-optimizer"
).split()


def app() -> typer.Typer:
    from cli.planning.plan_throughput import throughput

    program = typer.Typer()
    program.command()(throughput)
    return program


def test_pinned_as_json() -> None:
    result = CliRunner().invoke(app(), [*SIZES, *LAYOUT, "-o", "json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    wanted = {"iteration_s", "layout", "flop_per_s_per_worker", "mfu", "memory_bytes", "fits", "breakdown", "reasons"}
    assert wanted <= set(answer)
    assert answer["layout"]["sequence_parallel"] is False


def test_searched_as_text() -> None:
    result = CliRunner().invoke(app(), [*SIZES, "--workers", "96"])
    assert result.exit_code == 0, result.output
    assert "MFU" in result.stdout


def test_bad_input_is_the_projects_error() -> None:
    result = CliRunner().invoke(app(), [*SIZES, "--workers", "1000000000000"])
    assert isinstance(result.exception, InvalidInput)
    assert "workers" in str(result.exception)
    with pytest.raises(json.JSONDecodeError):
        json.loads(result.stdout)
