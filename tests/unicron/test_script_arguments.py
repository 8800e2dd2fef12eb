"""How a task's script is started: with its arguments, as a file or as a module, and in whose loop."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from tests.unicron.test_scripts import script
from unicron import train
from unicron.protocol import environment
from unicron.protocol.messages import Finished
from unicron.trainer import spec

SAYS = "import json, sys\nprint(json.dumps([__name__, __package__, sys.argv, sys.path[0]]))\n"

ARGUMENTS = ["--lr", "1e-3", "", "two words", "-x"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a script, a package with a module, and a package that can be run."""
    for name in ("script.py", "launched/__init__.py", "launched/inner/__init__.py", "launched/inner/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else SAYS)
    (tmp_path / "launched/inner/__main__.py").write_text("from .train import json\n" + SAYS)
    return tmp_path


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``sys.argv``, ``sys.path`` and the modules as they were, behind the test."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {name for name in sys.modules if name.partition(".")[0] == "launched"} - before:
        del sys.modules[name]


def started(path: Path, module: str, capsys: pytest.CaptureFixture[str]) -> list[object]:
    """Return what a script says of itself."""
    train.run_script(str(path), ARGUMENTS, module=module)
    said: list[object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return said


def test_a_script_has_its_arguments(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = package / "script.py"
    assert started(path, "", capsys) == ["__main__", "", [str(path), *ARGUMENTS], str(package)]


@pytest.mark.parametrize(
    ("file", "module"),
    [("launched/inner/train.py", "launched.inner.train"), ("launched/inner/__main__.py", "launched.inner")],
)
def test_a_module_is_run_as_python_m_does(
    package: Path, file: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = package / file
    assert started(path, module, capsys) == ["__main__", "launched.inner", [str(path), *ARGUMENTS], str(package)]


def test_a_module_is_found_by_the_folder_of_its_outermost_name(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "launched/inner/only_here.py").write_text(SAYS)
    assert started(package / "launched/inner/only_here.py", "only_here", capsys)[3] == str(package / "launched/inner")


async def test_a_rank_starts_the_script_with_the_arguments_of_the_specification(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    after = f"import sys; assert sys.argv[1:] == {ARGUMENTS!r}, sys.argv"
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(script=script(tmp_path, after=after), arguments=ARGUMENTS))
        await a.configure({"w0": "initial"})
        assert isinstance(await a.finished(1), Finished)


def test_the_adapter_is_there_before_a_script_that_calls_pretrain(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unicron.megatron_lm.script.replace_pretrain", lambda: print("replaced"))
    path = package / "script.py"
    train.run_script(str(path), ARGUMENTS, loop=spec.MEGATRON_LM)
    first, said = capsys.readouterr().out.splitlines()
    assert (first, json.loads(said)[2]) == ("replaced", [str(path), *ARGUMENTS])


def test_what_a_specification_says_of_its_script_reaches_the_rank() -> None:
    fields = {
        "name": "a", "steps": 1, "data": "x", "model": {"layers": 1, "hidden": 8, "heads": 1, "sequence_length": 8},
        "batch": {"global": 1}, "script": "/launched/train.py",
    }  # fmt: skip
    usual = spec.parse(fields)
    assert (usual.arguments, usual.module, usual.loop) == ((), "", spec.OWN_LOOP)
    found = spec.parse({**fields, "arguments": ARGUMENTS, "module": "launched.train", "loop": "megatron-lm"})
    assert (found.arguments, found.module, found.loop) == (tuple(ARGUMENTS), "launched.train", spec.MEGATRON_LM)


def test_a_script_works_where_the_task_says(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    monkeypatch.setenv(environment.WORKING_DIRECTORY, str(package / "launched"))
    monkeypatch.setenv(environment.SEARCH_PATH, os.pathsep.join(["inner", "", sys.path[-1]]))
    others = [*sys.path]
    train.enter_directory()
    assert Path.cwd() == package / "launched"
    assert sys.path == [str(package / "launched" / "inner"), *others]
    monkeypatch.setenv(environment.WORKING_DIRECTORY, str(package / "no-such-folder"))
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        train.enter_directory()
