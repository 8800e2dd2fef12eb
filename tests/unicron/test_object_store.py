"""Checkpoints in an object store: moto's S3 server on the loopback interface."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fsspec.registry import known_implementations

from unicron.checkpoint import archive, parts, storage, target
from unicron.checkpoint.archive import Manifest
from unicron.errors import DamagedCheckpoint, InvalidSpec
from unicron.state.chunks import undivided

BUCKET = "checkpoints"
CHUNK = undivided("parameter/a", (2, 3), "float32")
VALUES = torch.arange(6.0)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server; its address."""
    from moto.server import ThreadedMotoServer  # half a second, in every process that collects tests

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def root(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A place of the test's own in the store, as a user's environment would make it reachable."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fs, _ = storage.opened(f"s3://{BUCKET}")
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    return f"s3://{BUCKET}/{request.node.name}/task"


def write(location: str, *, publish: bool = True) -> str:
    """Write a checkpoint of one chunk, and publish it."""
    files = parts.write(location, 0, {CHUNK: VALUES})
    parts.write_record(location, 0, files)
    if publish:
        read = parts.read_record(location, 0)
        archive.publish(location, Manifest(step=archive.step(location), digest="ab", files=read))
    return location


@pytest.mark.slow
def test_a_checkpoint_counts_once_it_has_its_manifest(root: str) -> None:
    location = write(f"{root}/generation-1/step-5", publish=False)
    assert archive.published(location) == []
    with pytest.raises(DamagedCheckpoint):
        archive.read(location)
    write(location)
    assert archive.published(location) == [location]
    ((name, file),) = archive.verify(location).files.items()
    with parts.reading(f"{location}/{name}") as tensor:
        (key,) = file.chunks
        assert torch.equal(tensor(key), VALUES)


def test_damage_is_found(root: str) -> None:
    location = write(f"{root}/generation-1/step-5")
    (name,) = archive.read(location).files
    content = bytearray(storage.read(f"{location}/{name}"))
    content[-1] ^= 1
    storage.write_whole(f"{location}/{name}", bytes(content))
    with pytest.raises(DamagedCheckpoint, match="not what was written"):
        archive.verify(location)
    storage.delete(f"{location}/{name}")
    with pytest.raises(DamagedCheckpoint, match=name):
        archive.verify(location)


def test_old_and_unfinished_checkpoints_are_deleted(root: str) -> None:
    kept = [write(f"{root}/generation-{g}/step-{s}") for g, s in ((3, 9), (2, 8))]
    old = [write(f"{root}/generation-{g}/step-{s}") for g, s in ((2, 7), (1, 6))]
    unfinished = write(f"{root}/generation-2/step-10", publish=False)
    present = write(f"{root}/generation-3/step-10", publish=False)
    assert archive.clean(present, before=3) == [unfinished]
    assert archive.retire(present, 2, [old[1]]) == [old[0]]
    assert archive.published(present) == [*kept, old[1]]
    fs, path = storage.opened(root)
    left = {fs.unstrip_protocol(name).rpartition("/")[0] for name in fs.find(path)}
    assert left == {*kept, old[1], present}


def test_the_place_can_be_proven(root: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert target.prove(root, 3, ["n0"], lambda work: work.wait()) == ""
        fs, path = storage.opened(root)
        assert fs.find(path) == []
    finally:
        dist.destroy_process_group()


def test_a_store_whose_client_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_implementations, "far", {"class": "far.Far", "err": "Install far"})
    with pytest.raises(InvalidSpec, match="Install far"):
        target.check("far://bucket/step-0")
    with pytest.raises(InvalidSpec, match="nowhere"):
        target.check("nowhere://bucket/step-0")
    target.check("/some/directory/step-0")
