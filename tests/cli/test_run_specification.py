"""``unicron run``: the specification of the task that a command line is."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.launch.checking import checked, interpreter_of, said, unused
from cli.launch.specification import Given, name_of, read_base, specification
from shared.errors import InvalidInput
from shared.names import is_name
from shared.tasks.specification import parse_spec
from tests.cli.test_run_check import CALLS_PRETRAIN, MODEL, write_script

MEGATRON = f"{MODEL} --global-batch-size 64 --train-iters 100"
REST = {
    "model": {"layers": 1, "hidden": 8, "heads": 1, "sequence_length": 1},
    "batch": {"global": 8, "micro": 2},
    "steps": 20,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script of each kind; without the variable that says where modules are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    write_script(tmp_path, "pretrain_gpt.py", CALLS_PRETRAIN)
    (tmp_path / "healed.py").write_text("import unicron\n")
    (tmp_path / "plain.py").write_text("import torch\n")
    return tmp_path


def of(command: str, **given: Any) -> dict[str, Any]:
    return specification(checked(shlex.split(command), given.get("base", {})), Given(**given))


def test_megatrons_pretrain_has_what_the_planner_needs_from_its_arguments(folder: Path) -> None:
    spec = of(f"torchrun --nproc-per-node 8 --max-restarts 5 pretrain_gpt.py {MEGATRON} "
              "--tensor-model-parallel-size 2 --vocab-size 1000 --tp-comm-overlap", workers=8)  # fmt: skip
    assert spec.pop("arguments")[:2] == ["--num-layers", "4"]
    assert spec == {
        "name": "pretrain-gpt",
        "script": str(folder / "pretrain_gpt.py"),
        "data": str(folder / "pretrain_gpt.py"),
        "loop": "megatron-lm",
        "model": {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 32, "vocabulary": 1000},
        "batch": {"global": 64, "micro": 1},
        "steps": 100,
        "parallel": {
            "tensor": 2, "pipeline": 1, "interleave": 1, "sequence_parallel": False, "distributed_optimizer": False,
            "overlap": False,
        },
        "workers": {"min": 2, "max": 8},
        "max_restarts": 5,
    }  # fmt: skip
    assert parse_spec(spec).most_workers == 8


def test_a_whole_restart_has_exactly_its_processes_and_what_is_known() -> None:
    spec = of("torchrun --nproc-per-node 4 plain.py --lr 1", workers=4)
    assert spec == {
        "name": "plain", "script": spec["script"], "arguments": ["--lr", "1"], "loop": "restart",
        "workers": {"min": 4, "max": 4}, "max_restarts": 3,
    }  # fmt: skip
    fp8 = of(f"torchrun --max-restarts 0 pretrain_gpt.py {MEGATRON} --fp8-format hybrid", workers=2)
    assert (fp8["loop"], fp8["steps"], fp8["batch"]) == ("restart", 100, {"global": 64, "micro": 1})
    assert (fp8["max_restarts"], "data" in fp8, "parallel" in fp8) == (0, False, False)
    assert "model" not in of(f"pretrain_gpt.py {MODEL} --fp8-format hybrid", workers=2), (
        "of what is known in part, nothing"
    )


def test_nothing_says_how_many_processes_restart() -> None:
    with pytest.raises(InvalidInput) as refused:
        of("plain.py")
    assert [error["field"] for error in refused.value.extra["errors"]] == ["--workers"]


def test_a_loop_on_the_library_has_the_rest_in_a_file(folder: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        of("healed.py")
    fields = [error["field"] for error in refused.value.extra["errors"]]
    assert fields == ["batch.global", "steps"]
    assert "--spec FILE" in refused.value.detail
    without_model = {"batch": {"global": 8}, "steps": 20}
    assert not parse_spec(of("healed.py", base=without_model, workers=2)).model_known
    assert of("healed.py", base=without_model, workers=2)["workers"] == {"min": 2, "max": 2}, "it begins with min"
    least = without_model | {"workers": {"min": 1}}
    assert of("healed.py", base=least, workers=2)["workers"] == {"min": 1, "max": 2}
    with pytest.raises(InvalidInput, match="tensor and pipeline above 1 need model"):
        parse_spec(of("healed.py", base=without_model | {"parallel": {"tensor": 2}}, workers=2))
    with pytest.raises(InvalidInput, match=r"model\.heads"):
        of("healed.py", base=REST | {"model": {"layers": 1, "hidden": 8, "sequence_length": 1}}, workers=2)
    spec = of("healed.py --lr 1", base=REST | {"weight": 2.0, "workers": {"min": 2}}, workers=4, env={"A": "1"})
    assert spec == REST | {
        "name": "healed", "script": str(folder / "healed.py"), "arguments": ["--lr", "1"], "weight": 2.0,
        "data": str(folder / "healed.py"), "workers": {"min": 2, "max": 4}, "env": {"A": "1"},
    }  # fmt: skip
    assert parse_spec(spec).loop == "unicron"


def test_a_script_of_megatron_bridge_is_healed_where_a_file_has_the_rest(folder: Path) -> None:
    (folder / "recipe.py").write_text("import megatron.bridge\n")
    assert of("recipe.py", workers=2)["loop"] == "restart"
    spec = of("recipe.py --lr 1", base=REST, workers=2)
    assert (spec["loop"], spec["workers"], spec["steps"]) == ("megatron-bridge", {"min": 1, "max": 2}, 20)
    assert parse_spec(spec).loop == "megatron-bridge"


def test_a_file_says_what_the_arguments_do_not(folder: Path) -> None:
    spec = of(f"pretrain_gpt.py {MODEL} --train-iters 7", base={"batch": {"global": 16}, "model": {"vocabulary": 99}})
    assert (spec["batch"], spec["model"]["vocabulary"], spec["steps"]) == ({"global": 16, "micro": 1}, 99, 7)
    assert spec["workers"] == {"min": 1}
    saved = of(f"pretrain_gpt.py {MEGATRON} --save a --save-interval 7", base={"checkpoint": {"keep": 3}})
    assert saved["checkpoint"] == {"every": 7, "keep": 3}
    assert "checkpoint" not in of(f"pretrain_gpt.py {MEGATRON} --save-interval 7")


def test_a_file_has_its_paths_from_its_own_folder(folder: Path) -> None:
    (folder / "of").mkdir()
    file = folder / "of" / "spec.yaml"
    file.write_text("data: a\nscript: ../healed.py\ncheckpoint: {directory: b}\n")
    base = read_base(file)
    assert base == {
        "data": str(folder / "of" / "a"),
        "script": str(folder / "healed.py"),
        "checkpoint": {"directory": str(folder / "of" / "b")},
    }
    assert of("healed.py", base=base | REST)["data"] == str(folder / "of" / "a")
    with pytest.raises(InvalidInput, match="--spec: script"):
        of("plain.py", base=base, workers=1)
    with pytest.raises(InvalidInput, match="--spec: arguments"):
        of("healed.py 1", base=REST | {"arguments": ["2"]})


@pytest.mark.parametrize("text", ["- 1", "a: [", "model: 3", "env: text"])
def test_a_file_without_fields_is_refused(text: str, folder: Path) -> None:
    (folder / "spec.yaml").write_text(text)
    with pytest.raises(InvalidInput, match="--spec"):
        read_base(folder / "spec.yaml")


def test_a_script_that_is_not_here_is_refused() -> None:
    for command in ("no_such.py", "-m no_such", "no-such-program"):
        with pytest.raises(InvalidInput, match="SCRIPT"):
            of(command, workers=1)


def test_a_module_and_a_program_are_run_as_such(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text("import torch\n")
    spec = of("python -m package.train 1", workers=1)
    assert (spec["name"], spec["module"], spec["script"]) == ("train", "package.train", f"{folder}/package/train.py")
    program = folder / "bin" / "tune"
    program.parent.mkdir()
    program.write_text("#!/usr/bin/env python3\nprint()\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    assert of("tune run", workers=1)["script"] == str(program)
    program.write_text("#!/bin/sh\n")
    with pytest.raises(InvalidInput, match="Python script"):
        of("tune run", workers=1)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("pretrain_gpt.py", "pretrain-gpt"), ("a/b/Train_GPT-2.py", "train-gpt-2"), ("package.train", "train"),
        ("package.__main__", "package"), ("tune", "tune"), ("___.py", "task"), ("x" * 80 + ".py", "x" * 58),
    ],
)  # fmt: skip
def test_name(script: str, name: str) -> None:
    assert name_of(script) == name
    assert is_name(name_of(script))


def test_the_lines_say_how_the_task_runs_and_what_is_not_run() -> None:
    found = checked(
        shlex.split(f"srun -N 4 /opt/x/bin/python3 pretrain_gpt.py {MEGATRON} --fp8-format hybrid --tp-comm-overlap")
    )
    lines = [*said(found)]
    assert "whole restarts" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["--fp8-format", "--tp-comm-overlap"]
    assert "--bf16" in lines[1]
    assert [line.split(";")[0] for line in unused(found)] == ["not run: srun"]
    assert any("run.steps()" in line for line in said(checked(["torchrun", "plain.py"])))
    assert [*unused(checked(["torchrun", "plain.py"]))] == []


@pytest.mark.parametrize(
    ("in_front", "named"),
    [
        ("apptainer exec --nv image.sif torchrun", "apptainer"),
        ("srun --container-image=image.sqsh python", "--container-image=image.sqsh"),
        ("/no/such/python", "/no/such/python"),
        ("/no/such/torchrun", "/no/such/python"),
    ],
)
def test_no_other_python_runs_in_place_of_the_one_that_is_meant(in_front: str, named: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        of(f"{in_front} pretrain_gpt.py {MEGATRON}")
    assert [error["value"] for error in refused.value.extra["errors"]] == [named]


def test_nodes_look_for_the_python_of_a_task_that_restarts_whole() -> None:
    assert of("/no/such/python plain.py", workers=1)["python"] == "/no/such/python"


def test_a_whole_restart_runs_in_the_interpreter_that_its_command_means(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder / "env" / "bin"
    place.mkdir(parents=True)
    for name in ("python", "torchrun"):
        (place / name).write_text("#!/bin/sh\n")
        (place / name).chmod(0o755)
    python = str(place / "python")
    assert of(f"{python} plain.py", workers=1)["python"] == python
    assert of(f"{place}/torchrun --nproc-per-node 2 plain.py", workers=2)["python"] == python
    assert "python" not in of("plain.py", workers=1)
    monkeypatch.setenv("PATH", str(place))
    assert of("torchrun --nproc-per-node 2 plain.py", workers=2)["python"] == python
    assert "python" not in of(f"{sys.executable} plain.py", workers=1), "it is the node agents' own"
    assert [*unused(checked([python, "plain.py"]))] == []


@pytest.mark.parametrize("has_library", [True, False])
def test_a_healed_script_runs_in_that_interpreter_where_it_has_the_library(folder: Path, has_library: bool) -> None:
    python = folder / "python"
    answer = json.dumps([has_library, "", False])
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    found = checked([str(python), "healed.py"])
    assert interpreter_of(found) == (str(python) if has_library else "")
    said = f"not run: {python}, which has no library (install its wheel there, docs/deploy.md#wheels); the script runs"
    assert [line.startswith(said) for line in unused(found)] == [True] * (not has_library)
