"""Secrets of tasks: a rank has them, and nothing else that anybody reads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path

import pytest

from services.agent.agent import Agent
from services.agent.files.task_secrets import MOST_BYTES, TaskSecrets
from shared.bus.connection import Bus
from shared.errors import InvalidInput, Unavailable
from shared.tasks.specification import TaskSpec, parse_spec
from tests.agent.kit import SPEC, Driver, Ear

SECRET = "c3f1-very-secret"


@pytest.fixture
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a secret, outside of the run directory."""
    path = tmp_path_factory.mktemp("secrets") / "key"
    path.write_text(SECRET + "\n")
    return path


def everything(folder: Path) -> list[bytes]:
    """Return the contents of all files in a folder."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def test_a_rank_has_the_value_and_no_message_file_or_log_line_has_it(
    agent: Agent, driver: Driver, ear: Ear, bus: Bus, key: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages: list[bytes] = []

    async def note(_: str, data: bytes) -> None:
        messages.append(data)

    await bus.listen(">", note)
    spec = {**SPEC, "secrets": {"API_KEY": f"file:{key}"}, "env": {"BEHAVIOUR": "digest"}}
    assert (await driver.ask("prepare", 1, workers=driver.workers, spec=spec)).ok
    assert (await driver.configure()).ok
    await ear.until(lambda: bool(ear.heartbeats) and any(w.step > 1 for w in ear.heartbeats[-1].workers))
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    outputs = [path.read_text() for path in (tmp_path / "tasks" / "gpt" / "output").glob("*.log")]
    assert [digest in output for output in outputs] == [True, True]
    assert len(messages) > 4
    assert not [data for data in messages if SECRET.encode() in data]
    contents = await asyncio.to_thread(everything, tmp_path)
    assert any(str(key).encode() in content for content in contents)  # the specification names its place
    assert not [content for content in contents if SECRET.encode() in content]
    assert SECRET not in caplog.text
    record = agent._inherited.record.read()
    assert record is not None
    assert SECRET not in record.model_dump_json()


async def test_a_rank_whose_secret_is_missing_is_not_started(agent: Agent, driver: Driver, key: Path) -> None:
    spec = {**SPEC, "secrets": {"API_KEY": f"file:{key}.none"}}
    reply = await driver.ask("prepare", 1, workers=["n0/0"], spec=spec)
    assert (reply.ok, reply.code) == (False, "unavailable")
    assert reply.detail == f"secret API_KEY cannot be used: file:{key}.none: No such file or directory"
    assert agent.node.slots["n0/0"] is None


def test_what_cannot_be_a_value_is_refused_without_being_shown(key: Path) -> None:
    secrets = TaskSecrets()
    os.mkfifo(key.parent / "pipe")
    (key.parent / "large").write_bytes(b"x" * (MOST_BYTES + 1))
    (key.parent / "null").write_bytes(b"qz\0qz")
    (key.parent / "latin").write_bytes(b"\xe4\xf6")
    wrong = {
        "pipe": "is no regular file",
        "large": "has more than 65536 bytes",
        "null": "has a null byte, which no variable can have",
        "latin": "is not UTF-8",
        "": "is no regular file",
    }
    for name, problem in wrong.items():
        assert secrets.problem(f"file:{key.parent / name}") == problem
        with pytest.raises(Unavailable) as refused:
            secrets.read({"A": f"file:{key.parent / name}"})
        assert "qz" not in refused.value.detail.rpartition(":")[2]
    assert secrets.read({"A": f"file:{key}"}) == {"A": SECRET}


def test_links_do_not_lead_out_of_the_directories_for_secrets(key: Path, tmp_path: Path) -> None:
    inside = tmp_path / "secrets"
    inside.mkdir()
    (inside / "own").write_text("own")
    (inside / "link").symlink_to(key)
    secrets = TaskSecrets.of_node([inside], separate_users=True)
    assert secrets.read({"A": f"file:{inside}/own"}) == {"A": "own"}
    for place in (f"file:{inside}/link", f"file:{key}", f"file:{inside}/../secrets/../../{key}"):
        assert secrets.problem(place)
    nowhere = TaskSecrets.of_node([], separate_users=True)
    assert "is not below a directory for secrets" in nowhere.problem(f"file:{key}")
    assert TaskSecrets.of_node([], separate_users=False).problem(f"file:{key}") == ""


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "hf_token", "DB_PASSWORD_1", "PASSWORD", "AWS_SECRET", "TOKEN", "KEY"]
)
def test_a_secret_in_the_environment_is_refused_with_a_pointer(name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"secrets: {{{name}: file:/path}}") as refused:
        parse_spec({**SPEC, "env": {name: SECRET}})
    assert SECRET not in json.dumps(refused.value.problem())


@pytest.mark.parametrize("name", ["KEYBOARD", "TOKENIZERS_PARALLELISM", "MONKEY", "NCCL_DEBUG"])
def test_other_names_are_not(name: str) -> None:
    assert parse_spec({**SPEC, "env": {name: "1"}}).env == {name: "1"}


@pytest.mark.parametrize(
    "secrets",
    [{"A": "value"}, {"A": "file:relative"}, {"A=B": "file:/a"}, {"UNICRON_NODE": "file:/a"}, {"A": "file:/\0"}],
)
def test_a_secret_is_a_variable_and_a_path(secrets: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="secrets"):
        parse_spec({**SPEC, "secrets": secrets})
    with pytest.raises(InvalidInput, match="in env, too"):
        parse_spec({**SPEC, "env": {"A": "1"}, "secrets": {"A": "file:/a"}})


def test_specifications_without_secrets_are_as_before() -> None:
    """Older versions read them."""
    assert "secrets" not in parse_spec(SPEC).model_dump_json()
    spec = parse_spec({**SPEC, "secrets": {"A": "file:/a"}})
    assert TaskSpec.model_validate_json(spec.model_dump_json(by_alias=True)) == spec
