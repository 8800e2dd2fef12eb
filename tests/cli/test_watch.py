"""Watchers report what other systems know of nodes. The systems are recorded, or servers and files that stand in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from cli.watch import cloud, kubernetes, machine, slurm
from cli.watch.kubernetes import Heard
from cli.watch.provider import Provider
from cli.watch.trouble import Trouble, key_of
from shared.events.union import NodeReported, NodeReportHeld
from shared.service import tokens
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import Server
from tests.cli.conftest import call_unicron, end, start_unicron
from tests.condition import until

RECORDED = Path(__file__).parent / "data" / "watch" / "scontrol.txt"
"""What Slurm 22.05 printed of nodes of which some had been drained, set down and set failing."""

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def token(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has the token of a monitor of the nodes gpu0 to gpu5."""
    made = tokens.add(settings.token_file, "watcher", Scope.REPORT, NOW, ["gpu*"])
    monkeypatch.setenv("UNICRON_TOKEN", made)


def reported(api: Server) -> list[NodeReported]:
    return [record.event for record in api.journal.log.read_all() if isinstance(record.event, NodeReported)]


def brief(found: list[Trouble]) -> list[tuple[str, str, str, str]]:
    return [(one.node, one.key, one.severity, one.reason) for one in found]


Answer = tuple[int, str] | None


@contextmanager
def stand_in(answer: Callable[[str, str, Mapping[str, str]], Answer]) -> Iterator[str]:
    """A server on loopback. ``answer``: method, path and headers -> status and text; None: 404. Gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            status, text = answer(self.command, self.path, self.headers) or (404, "")  # type: ignore[arg-type]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _respond

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ---- Slurm


def test_the_states_that_slurm_prints() -> None:
    assert brief(slurm.troubles(RECORDED.read_text())) == [
        ("gpu1", "slurm.drain", "warning", "bad fan, ticket 4711"),
        ("gpu2", "slurm.down", "error", "Not responding"),
        ("gpu3", "slurm.drain", "warning", "NHC: check_hw_ib: no IB port found"),
    ]


@pytest.mark.parametrize(
    ("state", "severity"),
    [
        ("IDLE", None),
        ("ALLOCATED*", None),  # not responding: Unicron asks the node itself
        ("IDLE+NOT_RESPONDING", None),
        ("IDLE+CLOUD+POWERED_DOWN", None),
        ("DOWN+CLOUD+POWERED_DOWN", None),
        ("MIXED+PLANNED", None),
        ("IDLE+MAINTENANCE+RESERVED", None),
        ("MIXED+DRAIN", "warning"),
        ("IDLE*+DRAIN+INVALID_REG", "warning"),
        ("ALLOCATED+FAIL", "warning"),
        ("DOWN*", "error"),
        ("DOWN*+DRAIN", "error"),
    ],
)
def test_a_state_of_slurm_is_a_trouble_or_none(state: str, severity: str | None) -> None:
    line = f"NodeName=A_1.x OS=Linux 5.14 #1 SMP State={state} ThreadsPerCore=1 Reason=a=b c [root@now] Comment=x"
    found = slurm.troubles(f"{line}\n\nno node\n")
    assert [(one.node, one.severity, one.reason) for one in found] == ([("a-1", severity, "a=b c")] if severity else [])


async def test_slurms_drained_node_is_reported(
    api: Server, token: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.join(*(f"gpu{number}" for number in range(6)))
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\n[ "$*" = "show node -o" ] && exec cat {RECORDED}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = await call_unicron("watch", "slurm", "--once", server=api.url)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "gpu1: warning slurm.drain (bad fan, ticket 4711): reported"
    assert [(event.node, event.severity, event.actor) for event in reported(api)] == [
        ("gpu1", "warning", "token/watcher"),
        ("gpu2", "error", "token/watcher"),
        ("gpu3", "warning", "token/watcher"),
    ]
    assert reported(api)[0].evidence["State"] == "UNKNOWN+DRAIN+NOT_RESPONDING"
    assert (await call_unicron("watch", "slurm", "--once", server=api.url)).out == done.out
    refused = await call_unicron("nodes", server=api.url)
    assert (refused.code, "allows reports of nodes and nothing else" in refused.err) == (7, True)
    monkeypatch.delenv("UNICRON_TOKEN")
    held = {"report": "token/watcher/slurm.drain", "why": "budget", "reason": "it may not"}
    await api.projected((await api.append(NodeReportHeld, node="gpu1", **held)).position)
    shown = (await call_unicron("nodes", server=api.url)).out.splitlines()
    assert shown[-3:] == [
        "gpu1, warning of token/watcher: slurm.drain: bad fan, ticket 4711 (not acted on: it may not)",
        "gpu2, error of token/watcher: slurm.down: Not responding (not acted on)",
        "gpu3, warning of token/watcher: slurm.drain: NHC: check_hw_ib: no IB port found (not acted on)",
    ]
    assert len(reported(api)) == 3
    program.write_text("#!/bin/sh\necho 'slurm_load_node error: Unable to contact slurm controller' >&2; exit 1\n")
    failed = await call_unicron("watch", "slurm", "--once", server=api.url)
    assert (failed.code, failed.out) == (5, "")
    assert "Unable to contact slurm controller" in failed.err


# ---- Kubernetes

READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}


def node(name: str = "gpu0", **status: Any) -> dict[str, Any]:
    conditions = [READY, *({"type": kind, "status": given} for kind, given in status.items())]
    return {"metadata": {"name": name}, "spec": {}, "status": {"conditions": conditions}}


def test_conditions_of_kubernetes() -> None:
    healthy = node(
        MemoryPressure="False", NetworkUnavailable="False", AcceleratedHardwareReady="True", KernelDeadlock="Unknown"
    )
    assert kubernetes.troubles([healthy], Heard()) == []
    unheard = node()
    unheard["status"]["conditions"][0] = {**READY, "status": "Unknown"}  # Unicron asks the node itself
    assert kubernetes.troubles([unheard], Heard()) == []
    bad = node("gpu1.cluster.local", ReadonlyFilesystem="True", AcceleratedHardwareReady="False", GpuXidError="True")
    heard = Heard(errors=["AcceleratedHardwareReady"], ignored=["GpuXidError"])
    assert [(one.node, one.key, one.severity) for one in kubernetes.troubles([bad], heard)] == [
        ("gpu1", "kubernetes.readonlyfilesystem", "warning"),
        ("gpu1", "kubernetes.acceleratedhardwareready", "error"),
    ]


def test_taints_of_kubernetes_and_the_label_of_nvsentinel() -> None:
    tainted = node()
    tainted["spec"]["taints"] = [
        {"key": key, "effect": "NoSchedule"}
        for key in (
            "node.kubernetes.io/unschedulable",
            "dedicated",
            "aws-node-termination-handler/spot-itn",
            "karpenter.sh/disrupted",
            "mine.example/bad",
        )
    ]
    found = kubernetes.troubles([tainted], Heard(taints=["mine.example/bad"]))
    assert [one.reason for one in found] == [
        "taint aws-node-termination-handler/spot-itn:NoSchedule",
        "taint karpenter.sh/disrupted:NoSchedule",
        "taint mine.example/bad:NoSchedule",
    ]
    labelled = node()
    for state, troubles in (("draining", 1), ("remediation-succeeded", 0)):
        labelled["metadata"]["labels"] = {kubernetes.SENTINEL: state}
        assert len(kubernetes.troubles([labelled], Heard())) == troubles


async def test_a_condition_of_kubernetes_is_reported(api: Server, token: None, tmp_path: Path) -> None:
    await api.join("gpu0", "gpu1")
    (tmp_path / "token").write_text("of-the-account\n")
    asked: list[str] = []

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        asked.append(path)
        if headers.get("Authorization") != "Bearer of-the-account":
            return 401, ""
        first = "continue=&" in f"{path}&"
        items = [node("gpu0")] if first else [node("gpu1", DiskPressure="True")]
        return 200, json.dumps({"items": items, "metadata": {"continue": "more"} if first else {}})

    with stand_in(answer) as address:
        arguments = ("watch", "kubernetes", "--api", address, "--account", str(tmp_path), "--once")
        done = await call_unicron(*arguments, "-o", "json", server=api.url)
        assert (done.code, done.err) == (0, "")
        assert json.loads(done.out)["key"] == "kubernetes.diskpressure"
        assert asked == ["/api/v1/nodes?limit=500&continue=", "/api/v1/nodes?limit=500&continue=more"]
        (event,) = reported(api)
        assert (event.node, event.evidence) == ("gpu1", {"type": "DiskPressure", "status": "True"})
        (tmp_path / "token").write_text("of-another")
        refused = await call_unicron(*arguments, server=api.url)
        assert (refused.code, "may not list nodes (401)" in refused.err) == (7, True)
    away = await call_unicron(*arguments, server=api.url)
    assert (away.code, address in away.err) == (5, True)
    outside = await call_unicron("watch", "kubernetes", "--once", server=api.url)
    assert (outside.code, "--api is needed outside of a pod" in outside.err) == (2, True)


# ---- clouds

AWS = {
    "instance-action": '{"action": "terminate", "time": "2026-03-01T12:02:00Z"}',
    "rebalance": '{"noticeTime": "2026-03-01T11:59:00Z"}',
    "scheduled": json.dumps(
        [
            {"NotBefore": "1 Mar 2026 13:00:00 GMT", "Code": "instance-retirement", "State": "active", "EventId": "e"},
            {"NotBefore": "1 Feb 2026 13:00:00 GMT", "Code": "system-reboot", "State": "completed"},
        ]
    ),
}


def test_notices_of_aws() -> None:
    assert cloud.of_aws("n0", {}, NOW) == []
    found = cloud.of_aws("n0", AWS, NOW)
    assert [(one.key, one.severity, one.deadline_at) for one in found] == [
        ("cloud.spot", "warning", NOW + timedelta(minutes=2)),
        ("cloud.rebalance", "warning", None),
        ("cloud.instance-retirement", "warning", NOW + timedelta(hours=1)),
    ]
    assert found[0].body(NOW)["deadline_s"] == 120.0


def test_notices_of_google() -> None:
    quiet = {"preempted": "FALSE", "maintenance-event": "NONE"}
    assert cloud.of_google("n0", quiet, NOW) == []
    assert cloud.of_google("n0", {**quiet, "maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, NOW) == []
    both = {"preempted": "TRUE\n", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE\n"}
    assert [(one.key, one.deadline_at) for one in cloud.of_google("n0", both, NOW)] == [
        ("cloud.preempted", NOW + timedelta(seconds=30)),
        ("cloud.maintenance", NOW + timedelta(seconds=60)),
    ]


def test_notices_of_azure() -> None:
    def event(kind: str, *machines: str, **fields: str) -> dict[str, Any]:
        return {"EventType": kind, "Resources": list(machines), "EventStatus": "Scheduled", **fields}

    at = "Sun, 01 Mar 2026 12:05:00 GMT"
    events = [
        event("Preempt", "vm-1", "VM-0", NotBefore=at),
        event("Reboot", "vm-1", NotBefore=at),
        event("Freeze", "vm-0", NotBefore=at),
        event("Redeploy", "vm-0", NotBefore=""),
    ]
    answers = {"name": "vm-0", "scheduledevents": json.dumps({"DocumentIncarnation": 3, "Events": events})}
    assert [(one.key, one.deadline_at) for one in cloud.of_azure("n0", answers, NOW)] == [
        ("cloud.preempt", NOW + timedelta(minutes=5)),
        ("cloud.redeploy", NOW),
    ]
    assert cloud.of_azure("n0", {"name": "vm-0"}, NOW) == []


async def test_a_notice_of_aws_is_reported_with_its_deadline(api: Server, token: None) -> None:
    await api.join("gpu0")
    soon, late = (datetime.now(UTC) + timedelta(seconds=seconds) for seconds in (300.0, 7200.0))

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            return 200, "of-imds"
        if headers.get("X-aws-ec2-metadata-token") != "of-imds":
            return 401, ""
        if path == "/latest/meta-data/spot/instance-action":
            return 200, json.dumps({"action": "stop", "time": soon.strftime("%Y-%m-%dT%H:%M:%SZ")})
        if path == "/latest/meta-data/events/maintenance/scheduled":
            return 200, json.dumps([{"NotBefore": late.strftime("%d %b %Y %H:%M:%S GMT"), "Code": "system-reboot"}])
        return None

    with stand_in(answer) as address:
        arguments = ("watch", "cloud", "aws", "--node", "gpu0", "--metadata", address, "--once")
        done = await call_unicron(*arguments, server=api.url)
    assert (done.code, done.err) == (0, "")
    (event,) = reported(api)  # what comes later than --ahead-s waits
    assert (event.key, event.severity) == ("cloud.spot", "warning")
    assert event.deadline_at is not None
    assert abs((event.deadline_at - soon).total_seconds()) < 30.0


@pytest.mark.parametrize("provider", Provider)
async def test_a_metadata_service_that_answers_otherwise_is_an_error(
    api: Server, token: None, provider: Provider
) -> None:
    with stand_in(lambda *_: (200, "<html>")) as address:
        arguments = ("watch", "cloud", provider.value, "--node", "gpu0", "--metadata", address, "--once")
        done = await call_unicron(*arguments, server=api.url)
    if provider is Provider.GOOGLE:  # neither of its words
        assert (done.code, done.out, done.err) == (0, "", "")
    else:
        assert (done.code, f"the metadata service of {provider.value}" in done.err) == (5, True)


# ---- this machine


def port(root: Path, state: str = "4: ACTIVE", *, device: str = "mlx5_0", downed: int = 0) -> None:
    folder = root / "sys/class/infiniband" / device / "ports/1"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "phys_state").write_text("5: LinkUp\n" if "ACTIVE" in state else "3: Disabled\n")
    (folder / "counters" / "link_downed").write_text(f"{downed}\n")


def test_a_port_that_was_active_and_stays_down_is_an_error(tmp_path: Path) -> None:
    seen: dict[str, machine.Seen] = {}

    def look(second: float) -> list[Trouble]:
        return machine.of_ports("n0", machine.read_ports(tmp_path), seen, second)

    assert look(0.0) == []  # a machine without such devices
    port(tmp_path)
    port(tmp_path, "1: DOWN", device="mlx5_1")  # no cable
    assert [look(second) for second in range(4)] == [[], [], [], []]
    port(tmp_path, "1: DOWN")
    assert [len(look(second)) for second in range(4, 7)] == [0, 0, 1]
    port(tmp_path)
    assert look(7.0) == []
    for path in sorted((tmp_path / "sys").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert [len(look(second)) for second in range(8, 11)] == [0, 0, 1]
    (found,) = look(11.0)
    assert (found.key, found.severity, found.reason) == (
        "port.mlx5_0-1",
        "error",
        "port mlx5_0/1 is gone (gone), and was active",
    )


def test_a_port_that_loses_its_link_again_and_again_is_a_warning(tmp_path: Path) -> None:
    seen: dict[str, machine.Seen] = {}
    found = []
    for number, second in enumerate((0.0, 10.0, 20.0, 30.0, 3700.0)):
        port(tmp_path, downed=100 + min(number, 3))  # what was lost before the first look does not count
        found.append(machine.of_ports("n0", machine.read_ports(tmp_path), seen, second))
    assert [len(one) for one in found] == [0, 0, 0, 1, 0]
    assert brief(found[3]) == [
        ("n0", "port.mlx5_0-1", "warning", "port mlx5_0/1 has lost its link 3 times within an hour")
    ]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:02:00.0", "error pcie-fatal"),
        ("pcieport 0000:00:02.0: AER: Uncorrectable (Non-Fatal) error message received", "warning pcie-nonfatal"),
        ("pcieport 0000:00:02.0: AER: Corrected error received: 0000:02:00.0", ""),
        ("nvme 0000:ed:01.0: AER: device recovery failed", "error pcie-recovery"),
        ("igen6_edac 0000:ed:01.0: AER: device recovery successful", ""),
        ("pcieport 0000:3a:00.0: pciehp: Slot(0-1): Link Down", "error pcie-link"),
        (
            "mlx5_core 0000:d2:00.0: poll_health:825: device's health compromised - reached miss count.",
            "error nic-health",
        ),
        ("mlx5_core 0000:d2:00.0: Fatal error 3 detected", "error nic-health"),
        ("mlx5_core 0000:d2:00.0 eth2: Link down", ""),
        ("NETDEV WATCHDOG: eth2 (mlx5_core): transmit queue 3 timed out", "warning nic-hung"),
        ("usb 1-1: new high-speed USB device number 2", ""),
    ],
)
def test_lines_of_the_kernel(line: str, key: str) -> None:
    assert [f"{one.severity} {one.key.removeprefix('kernel.')}" for one in machine.of_kernel("n0", [line])] == (
        [key] if key else []
    )


async def test_what_the_kernel_says_is_reported(api: Server, token: None, tmp_path: Path) -> None:
    await api.join("gpu0")
    port(tmp_path)
    (tmp_path / "dev").mkdir()
    kmsg = tmp_path / "dev" / "kmsg"
    kmsg.write_text("3,1,0,-;pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: of an earlier start\n")
    arguments = ("watch", "machine", "--node", "gpu0", "--root", str(tmp_path), "--every-s", "1")
    process = await start_unicron(*arguments, server=api.url)
    assert process.stdout is not None

    def opened() -> bool:
        links = Path(f"/proc/{process.pid}/fd").glob("*")  # some are closed before they are read
        return any(Path(os.path.realpath(link)) == kmsg for link in links)

    try:
        await until(opened)
        with kmsg.open("a") as log:
            log.write("3,2,9,-;mlx5_core 0000:d2:00.0: Fatal error 3 detected\n SUBSYSTEM=pci\n")
        printed = await asyncio.wait_for(process.stdout.readline(), 30)
    finally:
        process.send_signal(signal.SIGINT)
    done = await end(process)
    assert printed.decode().startswith("gpu0: error kernel.nic-health (mlx5_core 0000:d2:00.0: Fatal error 3 detected)")
    assert (done.code, done.err) == (130, "")
    assert [(event.key, event.severity) for event in reported(api)] == [("kernel.nic-health", "error")]
    nowhere = await call_unicron("watch", "machine", "--root", str(tmp_path / "no"), server=api.url)
    assert (nowhere.code, "dev/kmsg: No such file or directory" in nowhere.err) == (5, True)


# ---- the loop


async def test_a_node_that_is_not_known_keeps_no_other_one_waiting(
    api: Server, token: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of Slurm that are none of Unicron's, and those that the token does not name, are said once."""
    await api.join("gpu9")
    program = tmp_path / "scontrol"
    lines = "".join(f"NodeName={name} State=IDLE+DRAIN Reason=x\\n" for name in ("login", "gpu8", "gpu9"))
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\necho x >> {tmp_path}/asked\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    process = await start_unicron("watch", "slurm", "--every-s", "1", server=api.url)
    asked = tmp_path / "asked"
    try:
        await until(lambda: asked.exists() and asked.read_text().count("x") >= 3)
    finally:
        process.send_signal(signal.SIGTERM)
    done = await end(process)
    assert [line.split(":")[0] for line in done.out.splitlines()] == ["gpu9"]
    assert len(done.err.splitlines()) == 2
    assert "token/watcher may report of gpu*, and not of 'login'" in done.err


@pytest.mark.parametrize(
    "parts", [("slurm", "A B"), ("port", "mlx5_0/1"), ("x" * 200,), ("ü", "-"), ("cloud", "a:b_c")]
)
def test_keys_are_what_the_server_takes(parts: tuple[str, ...]) -> None:
    from shared.interface.models import ReportRequest

    body = Trouble("n0", key_of(*parts), "warning", "r " * 300, {"text": "x" * 9000}).body(NOW)
    assert ReportRequest.model_validate(body).key == key_of(*parts)


def test_a_monitors_token_names_nodes_and_no_other_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def token(*arguments: str) -> list[str]:
        code = main(["token", *arguments, "--run-dir", str(tmp_path)])
        printed = capsys.readouterr()
        assert (code, "--node" in printed.err) == ((2, True) if printed.err else (0, False)), printed.err
        return printed.out.splitlines()

    assert token("add", "slurm", "--scope", "report") == []
    assert token("add", "slurm", "--scope", "read", "--node", "n0") == []
    assert token("add", "slurm", "--scope", "report", "--node", "n0,n1") == []
    token("add", "alice")
    assert token("list")[0].split() == ["NAME", "SCOPE", "CREATED", "(UTC)"]
    assert len(token("add", "slurm", "--scope", "report", "--node", "n0", "--node", "rack1-*")) == 1
    heading, alice, slurm = (line.split() for line in token("list"))
    assert heading[:3] == ["NAME", "SCOPE", "NODES"]
    assert (alice[:3], slurm[:4]) == (["alice", "submit", "-"], ["slurm", "report", "n0", "rack1-*"])
