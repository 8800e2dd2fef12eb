"""``--ship``: which files of a folder come along, how paths of a specification follow, and what is sent."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.errors import InvalidInput
from shared.tasks.code import MOST_BYTES
from shared.tasks.code_archive import members
from shared.tasks.specification import TaskSpec, parse_spec
from tests.api.kit import Server, spec_dict
from tests.cli.conftest import call_unicron
from unicron_client import shipped_code
from unicron_client.shipped_code import looks_secret, shipment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, a module, and what is ignored."""
    made = tmp_path / "mine"
    write(made, "train.py", "lib/model.py", "data/large.bin", "lib/__pycache__/model.pyc", ".unicron/log.db", "run.log")
    (made / ".gitignore").write_text("data/\n")
    (made / "lib" / ".gitignore").write_text("*.tmp\n")
    write(made, "lib/a.tmp")
    return made


COMES = {".gitignore", "lib/.gitignore", "lib/model.py", "run.log", "train.py"}


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def git(folder: Path, *arguments: str) -> None:
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", "-C", str(folder), *own, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize("tree", ["none", "own", "above"])
def test_what_git_ignores_stays_whether_the_folder_is_in_a_repository_or_not(folder: Path, tree: str) -> None:
    if tree != "none":
        git(folder if tree == "own" else folder.parent, "init", "--quiet")
    found = shipment(folder)
    assert found.names == COMES
    assert [member.name for member in members(found.archive)] == sorted(COMES)
    assert str(found) == f"the code of {folder} comes along: 5 files, 10240 bytes, sha256 {found.code.digest}"


def test_what_is_committed_comes_along_although_it_is_ignored_and_what_was_deleted_does_not(folder: Path) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", "--force", "data/large.bin", "run.log")
    (folder / "run.log").unlink()
    assert shipment(folder).names == (COMES - {"run.log"}) | {"data/large.bin"}


def test_a_repository_in_the_folder_comes_along_as_a_submodule_or_without(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, "a.py", "b.tmp")
        (tmp_path / name / ".gitignore").write_text("*.tmp\n")
        git(tmp_path / name, "init", "--quiet")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "--quiet", "-m", "a")
    git(folder, "init", "--quiet")
    git(folder, "submodule", "add", "--quiet", str(tmp_path / "one"), "one")
    (tmp_path / "two").rename(folder / "two")
    inside = {f"{name}/{file}" for name in ("one", "two") for file in ("a.py", ".gitignore")}
    assert shipment(folder).names == COMES | inside | {".gitmodules"}


def test_without_git_nothing_says_what_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(InvalidInput, match=r"\.gitignore needs git, which is not installed"):
        shipment(folder)
    for ignores in folder.rglob(".gitignore"):
        ignores.unlink()
    assert shipment(folder).names == {"data/large.bin", "lib/a.tmp", "lib/model.py", "run.log", "train.py"}


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        ".env.prod",
        "a/server.pem",
        "id_rsa",
        "Credentials.json",
        "credentials",
        ".netrc",
        "tls.KEY",
        ".aws/config",
    ],
)
def test_what_looks_like_a_secret_is_refused_unless_it_is_named_or_ignored(name: str, folder: Path) -> None:
    write(folder, name)
    with pytest.raises(InvalidInput, match=f"named like secrets: {name}; name them in .gitignore, or give --ship-file"):
        shipment(folder)
    assert name in shipment(folder, [f"./{name}"]).names
    (folder / ".gitignore").write_text(f"data/\n{name}\n")
    assert shipment(folder).names == COMES


@pytest.mark.parametrize("name", ["credentials.py", "id_rsa.pub", ".env.example", "tokenizer.json", "keys.py"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not looks_secret(name)


def test_a_link_that_leaves_is_refused_and_one_that_stays_comes_along(folder: Path) -> None:
    (folder / "lib" / "main.py").symlink_to("../train.py")
    assert shipment(folder).names == COMES | {"lib/main.py"}
    (folder / "corpus").symlink_to("/data")
    with pytest.raises(InvalidInput, match=r"links that leave it: corpus; name them in \.gitignore"):
        shipment(folder)


def test_what_is_too_much_is_refused_with_what_is_largest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(MOST_BYTES)
    with pytest.raises(InvalidInput, match=rf"the largest are weights\.bin \({MOST_BYTES} bytes\)"):
        shipment(folder)
    (folder / "weights.bin").unlink()
    monkeypatch.setattr(shipped_code, "MOST_FILES", 3)
    with pytest.raises(InvalidInput, match="has 5 files, at most 3 come along"):
        shipment(folder)
    git(folder, "init", "--quiet")
    for empty in (folder / "data", folder / "none"):
        with pytest.raises(InvalidInput, match="--ship"):
            shipment(empty)


def given(folder: Path, **changes: Any) -> TaskSpec:
    return parse_spec(spec_dict(script=f"{folder}/train.py", data=f"{folder}/train.py") | changes)


def test_paths_in_the_folder_become_relative_and_others_stay(folder: Path) -> None:
    found = shipment(folder)
    env = {"UNICRON_WORKING_DIRECTORY": f"{folder}/lib", "PYTHONPATH": f"{folder}:/opt/lm:{folder}/lib", "A": "1"}
    spec = found.of(given(folder, env=env))
    assert (spec.script, spec.data, spec.code) == ("train.py", "train.py", found.code)
    assert spec.env == {"UNICRON_WORKING_DIRECTORY": "lib", "PYTHONPATH": ".:/opt/lm:lib", "A": "1"}
    assert parse_spec(spec.model_dump(mode="json", by_alias=True)) == spec
    # What is ignored is not there, and the script of a command that was given elsewhere works where the code is.
    spec = found.of(given(folder, data=f"{folder}/data/large.bin", env={"UNICRON_WORKING_DIRECTORY": "/home"}))
    assert (spec.data, spec.env) == (f"{folder}/data/large.bin", {})
    for script in (f"{folder}/lib/a.tmp", "/elsewhere/train.py"):
        with pytest.raises(InvalidInput, match=r"that comes along: it is elsewhere, or ignored"):
            found.of(given(folder, script=script))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"script": "../a.py"}, "script: must be a path below the folder"),
        ({"script": "/a.py"}, "script: must be a path below the folder"),
        ({"data": "a/../../b"}, "data: must be a path below the folder"),
        ({"env": {"UNICRON_WORKING_DIRECTORY": ".."}}, "UNICRON_WORKING_DIRECTORY must be below the folder"),
        ({"code": {"digest": "0", "size_bytes": 1, "files": 1}}, "code.digest"),
    ],
)
def test_paths_that_leave_the_folder_are_refused(changes: dict[str, Any], problem: str) -> None:
    code = {"digest": "0" * 64, "size_bytes": 10_240, "files": 1}
    with pytest.raises(InvalidInput, match=problem):
        parse_spec(spec_dict(script="a.py", data="a.py", code=code) | changes)


def test_specifications_without_code_are_as_before() -> None:
    assert "code" not in parse_spec(spec_dict()).model_dump_json()


async def test_submit_sends_the_folder_and_names_it(api: Server, folder: Path) -> None:
    file = folder.parent / "task.yaml"
    file.write_text(yaml.safe_dump(spec_dict(script="mine/train.py", data="mine/train.py")))
    done = await call_unicron("submit", str(file), "--ship", str(folder), server=api.url)
    assert done.code == 0, done.err
    digest = shipment(folder).code.digest
    assert f"comes along: 5 files, 10240 bytes, sha256 {digest}" in done.err
    spec = (await api.http.get("/v1/tasks/gpt")).json()["spec"]
    assert (spec["script"], spec["code"]["digest"]) == ("train.py", digest)
    assert (await api.http.get(f"/v1/code/{digest}")).content == shipment(folder).archive
    write(folder, "deploy.pem")
    done = await call_unicron("submit", str(file), "--ship", str(folder), server=api.url)
    assert (done.code, "deploy.pem" in done.err) == (2, True)
