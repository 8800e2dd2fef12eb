"""How a task's script is started: with its arguments, as a file or as a module, and in whose loop."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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


def core_of_the_environment() -> Path:
    """Return the folder of megatron-core, which this process has not imported."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def test_a_script_that_would_find_another_megatron_core_is_told_from_others(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = core_of_the_environment()
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__file__=str(installed / "__init__.py")))
    path = str(package / "script.py")
    assert train.foreign_core(path) == ""
    own = package / "megatron" / "core"
    own.parent.mkdir()
    own.symlink_to(installed)
    assert train.foreign_core(path) == "", "the same by another path"
    own.unlink()
    own.mkdir()
    (own / "__init__.py").touch()
    assert train.foreign_core(path) == str(package)
    assert train.foreign_core(str(package / "launched/inner/train.py"), "launched.inner.train") == str(package)
    assert train.foreign_core(str(package / "launched/inner/train.py")) == "", "not beside the script"
    monkeypatch.syspath_prepend(str(package))
    assert train.foreign_core(str(package / "launched/inner/train.py")) == str(package)
    monkeypatch.delitem(sys.modules, "megatron.core")
    assert train.foreign_core(path) == "", "nothing is imported yet"


@pytest.mark.slow
async def test_such_a_script_runs_in_a_fresh_interpreter_with_the_core_that_it_finds(
    spec_file: SpecFile, tmp_path: Path
) -> None:
    installed, own = core_of_the_environment(), tmp_path / "megatron" / "core"
    own.mkdir(parents=True)
    for entry in installed.iterdir():
        if entry.name == "__init__.py":
            (own / entry.name).write_text(entry.read_text())
        else:
            (own / entry.name).symlink_to(entry)
    after = "import os, megatron.core; print('found', megatron.core.__file__, os.getpid())"
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(script=script(tmp_path, after=after)))
        await a.configure({"w0": "initial"})
        assert isinstance(await a.finished(1), Finished)
        await a.until(lambda: "w0" in a.exits)
        assert a.exits["w0"][1] == 0
        assert f"found {own}/__init__.py {a.pids['w0']}" in a.output("w0")


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


@pytest.mark.parametrize(("adapter", "loop"), [("megatron_lm", spec.MEGATRON_LM), ("bridge", spec.BRIDGE)])
def test_the_adapter_is_there_before_a_script_that_calls_pretrain(
    adapter: str, loop: str, package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"unicron.{adapter}.script.replace_pretrain", lambda: print("replaced"))
    path = package / "script.py"
    train.run_script(str(path), ARGUMENTS, loop=loop)
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


def test_relative_paths_are_of_the_code_that_has_come_along(
    spec_file: SpecFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = spec_file(script="lib/train.py", data="/data/text")
    assert spec.load(file).script == "lib/train.py"
    monkeypatch.setenv(environment.CODE_DIRECTORY, "/run/code")
    assert (spec.load(file).script, spec.load(file).data) == ("/run/code/lib/train.py", "/data/text")


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
