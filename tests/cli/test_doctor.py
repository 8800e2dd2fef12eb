"""``unicron doctor``: each check judges good and bad facts; a real run finds what is true of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.doctor.between_nodes import Listener
from cli.doctor.between_nodes import measure as measure_peer
from cli.doctor.checks import STATE_COPIES, Finding, Verdict, findings
from cli.doctor.measured import DeviceFacts, Devices, Facts, Nats, Peer, RankPython, Storage
from cli.doctor.measuring import measure, rank_pythons
from shared.bus.identities import node_identity
from shared.errors import InvalidInput
from shared.nats.nats_server import NatsServer
from shared.settings.model import Settings, read_settings
from tests.agent.recorded_nvml import COMPILER, RecordedNvml
from tests.cli.conftest import Outcome, end

OK, WARNING, FAILED = Verdict

VERSIONS = {"python": "3.11.9", "unicron": "0.1.0", "torch": "2.13.0", "megatron-core": "0.16.1"}


def peer(name: str, rate: float = 1e9, **changes: object) -> Peer:
    """Return a peer over a good link."""
    rates = {"sent_bytes_per_s": rate, "received_bytes_per_s": rate}
    return Peer.model_validate(
        {"peer": name, "node": name, "round_trip_s": 0.001, "versions": VERSIONS, **rates, **changes}
    )


PYTHON = {"path": "/opt/train/bin/python", "listed": True, "versions": VERSIONS}

GOOD = Facts(
    node="n0",
    name_problem="",
    host_name="n0",
    host_addresses=["198.51.100.1"],
    address="198.51.100.1",
    interface="eth0",
    address_problem="",
    clock_synchronised=True,
    memory_place="/dev/shm",
    memory_bytes=64 << 30,
    memory_free_bytes=64 << 30,
    state_bytes=1 << 30,
    open_files=65536,
    threads=4096,
    ports=28232,
    run_dir="/var/lib/unicron",
    disk_free_bytes=64 << 30,
    output_bytes=1 << 30,
    uid=0,
    separate_users=True,
    rights_problem="",
    workers=8,
    nats=Nats(servers=["nats://control:4222"], version="2.12.0", round_trip_s=0.001),
    peers=[peer("n1"), peer("n2"), peer("n3")],
    versions=VERSIONS,
    pythons=[RankPython.model_validate(PYTHON)],
    devices=Devices(names=["NVIDIA H100 80GB HBM3"] * 8, driver="570.1"),
    storage=Storage(place="s3://bucket/prefix", write_bytes_per_s=1e9, read_bytes_per_s=1e9),
)


def judged(**changes: object) -> dict[str, Finding]:
    """Return the findings that are not as with good facts."""
    usual = {one.check: one for one in findings(GOOD)}
    facts = Facts.model_validate({**GOOD.model_dump(), **changes})
    return {one.check: one for one in findings(facts) if usual.get(one.check) != one}


def test_a_place_of_copies_that_something_clears_is_a_warning() -> None:
    found = judged(memory_clearers=["RemoveIPC=yes (a file) at the last logout of user ann"])["memory"]
    assert found.verdict is WARNING
    assert "cleared while tasks train: RemoveIPC=yes (a file)" in found.finding
    assert "RemoveIPC=no" in found.advice


def test_a_good_node_has_no_finding_that_asks_for_anything() -> None:
    found = findings(GOOD)
    assert {one.verdict for one in found} == {OK}
    assert {one.advice for one in found} == {""}


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "words"),
    [
        ({"clock_synchronised": False}, "clock", WARNING, "not synchronised"),
        ({"peers": [peer("n1"), peer("n2", offset_s=-6.0)]}, "clock", WARNING, "clock of n2 is 6.0 s behind"),
        ({"peers": [peer("n1", offset_s=1000.0)]}, "clock", FAILED, "clock of n1 is 1000.0 s ahead"),
        ({"memory_free_bytes": STATE_COPIES * (1 << 30) - 1}, "memory", WARNING, "copies need 8.6 GB"),
        ({"state_bytes": None, "memory_bytes": 64 << 20}, "memory", WARNING, "what a container has by itself"),
        ({"disk_free_bytes": 1 << 20}, "disk", FAILED, "1.0 MB free"),
        ({"disk_free_bytes": 1 << 29}, "disk", WARNING, "ranks of one task may leave 1.1 GB"),
        ({"open_files": 1024}, "open files", WARNING, "1024"),
        ({"threads": 512}, "threads", WARNING, "512 at most, and ranks may need 2304"),
        ({"ports": 100}, "ports", WARNING, "100"),
        ({"name_problem": "the host name gives no node name: 'a_b'"}, "name", FAILED, "a_b"),
        ({"host_addresses": []}, "name", WARNING, "cannot be resolved"),
        ({"address_problem": "no address of this machine"}, "address", FAILED, "no address of this machine"),
        ({"address": ""}, "address", WARNING, "not known"),
        ({"address": "127.0.0.1", "interface": "lo"}, "address", WARNING, "cannot reach it"),
        ({"nats": None}, "NATS", WARNING, "no credential"),
        ({"nats": Nats(servers=["nats://c:4222"], problem="refused")}, "NATS", FAILED, "nats://c:4222: refused"),
        ({"nats": Nats(servers=["nats://c:4222"], round_trip_s=0.2)}, "NATS", WARNING, "200.0 ms"),
        ({"peers": [peer("n1", problem="n1 is not reached")]}, "peer n1", FAILED, "not reached"),
        ({"peers": [peer("n1"), peer("n2"), peer("n3", 4e8)]}, "peer n3", WARNING, "median of the pairs is 1.0 GB/s"),
        ({"peers": [peer("n1", 1e7)]}, "peer n1", WARNING, "10.0 MB/s"),
        ({"peers": [peer("n1", sent_bytes_per_s=1e7)]}, "peer n1", WARNING, "sends 10.0 MB/s"),
        ({"peers": [peer("n1", round_trip_s=0.3)]}, "peer n1", WARNING, "300.0 ms"),
        ({"versions": {"python": "3.11.9"}}, "versions", WARNING, "without torch, megatron-core"),
        ({"pythons": [PYTHON | {"problem": "no library"}]}, "python", FAILED, "no library"),
        ({"pythons": [PYTHON | {"lacking": ["torch"]}]}, "python", FAILED, "/opt/train/bin/python has no torch"),
        (
            {"pythons": [PYTHON | {"lacking": ["torch"], "listed": False}]},
            "python",
            WARNING,
            "/opt/train/bin/python has no torch",
        ),
        (
            {"peers": [peer("n1", versions=VERSIONS | {"torch": "2.9.0"})]},
            "versions of n1",
            WARNING,
            "torch 2.9.0 there, 2.13.0 here",
        ),
        ({"devices": Devices(problem="driver mismatch")}, "devices", FAILED, "driver mismatch"),
        ({"devices": Devices(names=["A"] * 4, driver="1")}, "devices", FAILED, "4 (A), driver 1; 8 workers"),
        ({"devices": Devices(names=["A"] * 9, driver="1")}, "devices", WARNING, "9 (A)"),
        ({"devices": Devices(names=["A"] * 7 + ["B"], driver="1")}, "devices", WARNING, "A, B"),
        ({"storage": Storage(place="s3://b", problem="AccessDenied")}, "storage", FAILED, "s3://b: AccessDenied"),
        ({"storage": Storage(place="/x", write_bytes_per_s=1e6, read_bytes_per_s=1e9)}, "storage", WARNING, "1.0 MB/s"),
        (
            {"storage": Storage(place="/x", shared=False, write_bytes_per_s=1e9, read_bytes_per_s=1e9)},
            "storage is shared",
            WARNING,
            "only the run directory",
        ),
        ({"rights_problem": "runs as user 1000"}, "rights", FAILED, "runs as user 1000"),
    ],
)
def test_bad_facts_are_judged_with_what_to_do(
    changes: dict[str, object], check: str, verdict: Verdict, words: str
) -> None:
    found = judged(**changes)[check]
    assert found.verdict is verdict
    assert words in found.finding
    assert found.advice


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"devices": Devices()}, "devices", "no GPU: 8 CPU workers"),
        ({"state_bytes": None}, "memory", "for a state of 8.6 GB"),
        ({"clock_synchronised": None}, "clock", "does not say"),
        ({"host_addresses": ["127.0.1.1"]}, "name", "of which Unicron makes no use"),
        ({"separate_users": False}, "rights", "ranks as well"),
    ],
)
def test_what_is_no_fault_is_said(changes: dict[str, object], check: str, words: str) -> None:
    found = judged(**changes)[check]
    assert (found.verdict, found.advice) == (OK, "")
    assert words in found.finding


ONE = DeviceFacts(
    entry="2",
    name="NVIDIA H200",
    memory_bytes=150_754_820_096,
    memory_used_bytes=603_979_776,
    temperature_c=36,
    utilisation_percent=0,
)


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, OK, "NVIDIA H200, 150.8 GB, 36 C, 0% busy, 604.0 MB used"),
        ({"notes": ["slowed down by the hardware: too hot"]}, WARNING, "604.0 MB used, slowed down by the hardware"),
        ({"faults": ["the device is lost"]}, FAILED, "the device is lost"),
        ({"memory_bytes": None, "memory_used_bytes": None, "utilisation_percent": None}, OK, "NVIDIA H200, 36 C"),
    ],
)
def test_each_device_is_described(changes: dict[str, object], verdict: Verdict, words: str) -> None:
    device = ONE.model_copy(update=changes)
    found = judged(devices=GOOD.devices.model_copy(update={"each": [device]}))["device 2"]
    assert found.verdict is verdict
    assert words in found.finding
    assert bool(found.advice) == (verdict is not OK)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library")
async def test_the_driver_is_asked_for_the_devices_that_the_agent_may_use(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml = RecordedNvml(tmp_path / "nvml", devices=2)
    nvml.answer(device__1__temperature="92", device__1__remap_failure="1")
    with nvml.loaded():
        alone = settings.model_copy(update={"nats_credential": None, "workers_per_node": 1})
        found = {one.check: one for one in findings(await measure(alone, [], None))}
        assert found["devices"].finding == "1 (NVIDIA H100 80GB HBM3), driver 550.54.15; 1 workers"
        assert found["device 1"].verdict is FAILED
        assert "85.5 GB, 92 C, 97% busy, 61.2 GB used, " in found["device 1"].finding
        on_cpu = await measure(alone.model_copy(update={"hardware": "cpu"}), [], None)
        assert {one.check: one for one in findings(on_cpu)}["devices"].finding == "no GPU: 1 CPU workers"


@asynccontextmanager
async def listening(versions: dict[str, str]) -> AsyncIterator[str]:
    """Run a listener; yield its address."""
    listener = Listener("n9", versions)
    port = await listener.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        listener.close()


async def test_a_peer_is_measured_in_both_directions() -> None:
    async with listening(VERSIONS) as address:
        found = await measure_peer(address)
    assert (found.problem, found.node, found.versions) == ("", "n9", VERSIONS)
    assert found.sent_bytes_per_s > 0
    assert found.received_bytes_per_s > 0
    assert 0 < found.round_trip_s
    assert abs(found.offset_s) <= found.round_trip_s  # one clock, read between question and answer


async def test_a_peer_that_is_not_there_or_is_another_program_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "is not reached" in (await measure_peer(f"127.0.0.1:{port}")).problem

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\n")
        writer.close()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with other:
        found = await measure_peer(f"127.0.0.1:{other.sockets[0].getsockname()[1]}")
    assert "is no `unicron doctor --listen`" in found.problem


@pytest.mark.parametrize("address", ["n1", "n1:", ":7642", "n1:x", "n1:65536"])
async def test_an_address_that_is_none_is_refused(address: str, settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="allowed: HOST:PORT"):
        await measure(settings, [address], None)


@pytest.mark.slow
async def test_the_storage_takes_a_file_and_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings(run_dir=tmp_path / "run", checkpoint_url=f"file://{tmp_path / 'store'}")
    good = (await measure(settings, [], None)).storage
    assert (good.problem, good.shared, os.listdir(tmp_path / "store")) == ("", True, [])
    assert min(good.write_bytes_per_s, good.read_bytes_per_s) > 0
    (tmp_path / "file").touch()
    bad = (await measure(read_settings(run_dir=tmp_path, checkpoint_url=f"file://{tmp_path}/file/x"), [], None)).storage
    assert bad.problem
    unknown = await measure(read_settings(run_dir=tmp_path, checkpoint_url="nosuch://bucket"), [], None)
    assert "nosuch" in unknown.storage.problem


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    """Start the command with these settings and no other."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cli.main",
        "doctor",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=mine | environment,
    )


async def checked(*arguments: str, **environment: str) -> tuple[Outcome, dict[str, Finding]]:
    """Run the command; return what it gave, and its findings."""
    outcome = await end(await start(*arguments, "-o", "json", **environment))
    found = [Finding(**one) for one in json.loads(outcome.out)["findings"]]
    return outcome, {one.check: one for one in found}


@pytest.mark.slow
async def test_the_pythons_of_the_ranks_are_asked(tmp_path: Path) -> None:
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    without.chmod(0o755)
    own, *none = await rank_pythons(Settings())
    assert (own.path, own.listed, own.problem, own.lacking, none) == (sys.executable, False, "", [], [])
    assert own.versions.keys() >= {"python", "unicron", "torch"}
    (listed,) = await rank_pythons(Settings(interpreters=str(without)))
    assert (listed.path, listed.listed, listed.versions) == (str(without), True, {})
    assert "cannot import the library: ModuleNotFoundError" in listed.problem


@pytest.mark.slow
async def test_a_real_run_with_nats_and_a_peer(tmp_path: Path) -> None:
    nats = NatsServer(tmp_path / "nats")
    nats.keys.make(more=[node_identity("n0")])
    await nats.start()
    settings = {
        "UNICRON_RUN_DIR": str(tmp_path / "run"),
        "UNICRON_NATS_URL": nats.url,
        "UNICRON_NATS_CREDENTIAL": str(nats.keys.credential_file(node_identity("n0"))),
    }
    listener = await start("--listen", "--bind", "127.0.0.1:0", UNICRON_NODE="n9")
    try:
        assert listener.stdout is not None
        at = (await asyncio.wait_for(listener.stdout.readline(), 50)).decode().split()[1]
        outcome, found = await checked("--peer", at, **settings)
        text = await end(await start("--peer", at, **settings))
    finally:
        listener.send_signal(signal.SIGINT)
        await asyncio.wait_for(listener.wait(), 50)
        await nats.stop()
    assert (outcome.code, outcome.err) == (0, "")
    assert "version 2" in found["NATS"].finding
    assert found["address"].finding.startswith("127.0.0.1 on lo")
    assert found["name"].finding.startswith("n0")
    assert f"peer {at}" in found
    assert f"versions of {at}" not in found
    assert listener.returncode == 0
    assert (text.code, text.out.split()[:2]) == (0, ["CHECK", "VERDICT"])

    outcome, found = await checked("--peer", at, **settings)
    assert outcome.code == 1
    assert {check for check, one in found.items() if one.verdict == FAILED} == {"NATS", f"peer {at}"}
