"""The stack that is recorded: ``unicron up`` of any commit, asked by REST and by the command line alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.condition import until_blocking

WAIT_S = 180.0
"""Longest wait for any one thing: seconds when the machine is idle, minutes when it is busy."""

POLL_S = 0.2

MEMORY = Path("/dev/shm")
"""Where agents keep copies in memory by default."""

APPENDS = """\
import sys

from shared.events.union import EVENT
from shared.log.log import EventLog

log = EventLog(sys.argv[1])
log.append([EVENT.validate_json(line) for line in sys.stdin])
log.close()
"""
"""A program of the recorded code that appends events to its log; a service relays them within a second."""

Answer = dict[str, Any]
"""What the REST interface answers."""


class Cluster:
    """A running ``unicron up``, asked and answered over REST."""

    def __init__(self, stack: psutil.Process, url: str, corpus: Path, python: Path) -> None:
        self._stack = stack
        self._python = python
        self._corpus = corpus
        self._client = httpx.Client(base_url=url, timeout=30.0, trust_env=False)
        self._stopped = 0

    def submit(self, name: str, *, steps: int = 40, script: str | None = None, **fields: Any) -> None:
        """Submit a small GPT, or a script in its place."""
        spec = {
            "name": name,
            "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32, "vocabulary": 257},
            "batch": {"global": 8, "micro": 1},
            "steps": steps,
            "data": str(self._corpus),
            "script": script,
            "checkpoint": {"every": 50},
            **fields,
        }
        print(f"submits {name}", flush=True)
        self._client.post("/v1/tasks", json=spec).raise_for_status()

    def stop(self, name: str, **options: Any) -> None:
        """Ask a task to stop."""
        print(f"stops {name}", flush=True)
        self._client.post(f"/v1/tasks/{name}/stop", json=options or None).raise_for_status()

    def change(self, name: str, **patch: Any) -> None:
        """Change a task's weight or limits, and wait until the plan that follows is done."""
        before = len(self._plans("task-changed"))
        print(f"changes {name}: {patch}", flush=True)
        self._client.patch(f"/v1/tasks/{name}", json=patch).raise_for_status()
        self._until(lambda: len(self._plans("task-changed", "done")) > before, f"{name} is changed")

    def resume(self, name: str) -> None:
        """Have a task that was stopped, or waits after failures, go on."""
        print(f"resumes {name}", flush=True)
        self._client.post(f"/v1/tasks/{name}/resume").raise_for_status()

    def delete(self, name: str) -> None:
        """List a task no more."""
        print(f"deletes {name}", flush=True)
        self._client.delete(f"/v1/tasks/{name}").raise_for_status()

    def says_about_the_last_incident(self, text: str) -> None:
        """Acknowledge the newest incident, and add a note to it."""
        newest: dict[str, str | int] = {"order": "newest", "limit": 1}
        (incident,) = self._client.get("/v1/incidents", params=newest).raise_for_status().json()["items"]
        print(f"notes {text}", flush=True)
        for path, body in (("acknowledge", None), ("notes", {"text": text})):
            self._client.post(f"/v1/incidents/{incident['id']}/{path}", json=body).raise_for_status()

    def takes(self, key: str) -> None:
        """Acknowledge a cause of trouble, once there is one of this key."""

        def taken() -> bool:
            return self._client.post(f"/v1/troubles/{key}/acknowledge").is_success

        self._until(taken, f"{key} is acknowledged")

    def has_logged(self, kind: str) -> None:
        """Wait until there is an event of a type."""
        wanted = {"type": kind}
        self._until(lambda: bool(self._client.get("/v1/events", params=wanted).json()["items"]), f"there is {kind}")

    def refuses(self, name: str) -> None:
        """Wait until a task has not stopped as asked."""
        self._until(lambda: bool(self.task(name)["stop_refused"]), f"{name} is not stopped")

    def task(self, name: str) -> Answer:
        """Return a task as the interface shows it."""
        answer: Answer = self._client.get(f"/v1/tasks/{name}").raise_for_status().json()
        return answer

    def reaches(self, name: str, step: int) -> None:
        """Wait until a task trains and has done some more steps than it has now."""
        goal = self.task(name)["step"] + step
        self._until(lambda: self._trains_at(name, goal), f"{name} trains at step {goal}")

    def ends(self, name: str, state: str) -> None:
        """Wait until a task is in this state, and its processes are gone if it has stopped."""
        self._until(lambda: self.task(name)["state"] == state, f"{name} is {state}")
        if state == "stopped":
            self._stopped += 1
            self.has_answered("task-ended", self._stopped)

    def waits(self, name: str) -> None:
        """Wait until a task has no workers."""
        self._until(lambda: self.task(name)["workers"] == 0, f"{name} has no workers")

    def is_held_back(self, name: str) -> None:
        """Wait until no process of a task is started for a time, since its last ones failed alike."""
        self._until(lambda: (self.task(name)["wait"] or {}).get("until") is not None, f"{name} is held back")

    def needs_operator(self, name: str) -> None:
        """Wait until a task is not tried any further by itself."""

        def is_given_up() -> bool:
            task = self.task(name)
            return task["state"] == "queued" and task["wait"] is not None and task["wait"]["until"] is None

        self._until(is_given_up, f"{name} waits for its operator")

    def kill_rank(self, name: str, rank: int) -> None:
        """Kill one process of a task."""
        pid = next(r["pid"] for r in self.task(name)["ranks"] if r["rank"] == rank)
        print(f"kills rank {rank} of {name}", flush=True)
        os.kill(pid, signal.SIGKILL)

    def loses_copies(self, name: str) -> None:
        """Remove a task's copies in memory, and wait until they are missed, and are there again."""
        print(f"removes the copies of {name}", flush=True)
        for node in {rank["node"] for rank in self.task(name)["ranks"]}:
            digest = hashlib.sha256(f"{self._corpus.parent.resolve()}\0{node}".encode()).hexdigest()
            for path in (MEMORY / f"unicron-{digest[:16]}" / name).iterdir():
                path.unlink(missing_ok=True)
        events: dict[str, str | int] = {"type": "task.copies-lacking", "limit": 100}

        def are_back() -> bool:
            items = self._client.get("/v1/events", params=events).raise_for_status().json()["items"]
            return any(item["event"].get("ended") for item in items)

        self._until(are_back, f"{name} has copies again")

    def worker(self, name: str, rank: int) -> str:
        """Return the worker of a rank of a task."""
        return next(str(r["worker"]) for r in self.task(name)["ranks"] if r["rank"] == rank)

    @staticmethod
    def now() -> str:
        """Return the time, as events have it."""
        return datetime.now(UTC).isoformat()

    def observes(self, **event: Any) -> None:
        """Append an event that a part of the system would append if it saw what it says."""
        body = {"event_id": str(uuid.uuid4()), "occurred_at": self.now(), "schema_version": 1, **event}
        print(f"observes {event['type']}", flush=True)
        command: list[str | Path] = [self._python, "-P", "-c", APPENDS, f"sqlite:///{self._corpus.parent / 'log.db'}"]
        subprocess.run(command, input=json.dumps(body), text=True, cwd=self._corpus.parent, check=True)

    def slows(self, name: str, worker: str, slowdown: float) -> None:
        """Say that a worker is slow, or as fast again; wait for the plan, which may come behind a trial."""
        before = len(self._plans("worker-slowed"))
        self.observes(
            type="worker.slowed",
            node=worker.rpartition("/")[0],
            worker=worker,
            slowdown=slowdown,
            task=name,
            generation=self.task(name)["generation"],
        )
        self._until(lambda: len(self._plans("worker-slowed")) > before, f"{worker} is {slowdown} x slower")

    def _plans(self, trigger: str, state: str = "") -> list[Answer]:
        items = self._client.get("/v1/plans", params={"limit": 100}).raise_for_status().json()["items"]
        return [item for item in items if item["trigger"] == trigger and state in ("", item["state"])]

    def has_answered(self, trigger: str, plans: int) -> None:
        """Wait until so many plans for a trigger are carried out."""
        self._until(lambda: len(self._plans(trigger, "done")) >= plans, f"{plans} plans for {trigger} are done")

    def lose_node(self, node: str) -> None:
        """Kill a node's agent and everything it started; the stack starts the agent again after some seconds."""
        agent = self._agent(node)
        print(f"kills node {node}", flush=True)
        for process in [agent, *agent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._until(lambda: not self._usable(node), f"node {node} is lost")
        self._until(lambda: self._usable(node), f"node {node} is back")

    def ask_node(self, node: str, what: str, state: str) -> None:
        """Ask something of a node, and wait until the node is in a state."""
        print(f"{what} {node}", flush=True)
        self._client.post(f"/v1/nodes/{node}/{what}").raise_for_status()
        self._until(lambda: self._node(node)["state"] == state, f"node {node} is {state}")

    def reports(self, node: str, key: str, severity: str, *, answer: str | None) -> None:
        """Report a trouble of a node, and wait until this has followed; None: until it is held back."""
        print(f"reports {severity} {key} of {node}", flush=True)
        body = {"key": key, "severity": severity, "reason": "as recorded", "evidence": {"line": "a line"}}
        self._client.post(f"/v1/nodes/{node}/reports", json=body).raise_for_status()

        def followed() -> bool:
            found = [one for one in self._node(node)["reports"] if one["key"] == key]
            return bool(found) and (bool(found[0]["held"]) if answer is None else found[0]["answer"] == answer)

        self._until(followed, f"{answer or 'nothing'} follows from {key} of {node}")

    def replace_agent(self, node: str, end: Callable[[str], None]) -> None:
        """End a node's agent, and wait until it has another one."""
        before = self._node(node)["incarnation"]
        print(f"{end.__name__} of {node}", flush=True)
        end(node)
        self._until(lambda: self._node(node)["incarnation"] != before, f"node {node} has another agent")
        self._until(lambda: self._usable(node), f"node {node} is ready")

    def kill_agent(self, node: str) -> None:
        """Kill a node's agent, not its supervisor."""
        os.kill(self._node(node)["agent_pid"], signal.SIGKILL)

    def restart_agent(self, node: str) -> None:
        """Have a node's agent hand over."""
        self._client.post(f"/v1/nodes/{node}/agent/restart").raise_for_status()

    def _node(self, node: str) -> Answer:
        answer: Answer = self._client.get(f"/v1/nodes/{node}").raise_for_status().json()
        return answer

    def add_node(self, node: str, hardware: str) -> psutil.Popen:
        """Start a further agent, of another kind of hardware, as the stack starts its own."""
        agent = self._agent("n0")
        credential = Path(agent.environ()["UNICRON_NATS_CREDENTIAL"])
        adds = [agent.cmdline()[0], "-P", "-m", "cli.main", "node", "add", node, "--keys", str(credential.parents[1])]
        subprocess.run(adds, env=agent.environ(), cwd=agent.cwd(), check=True)
        mine = {"UNICRON_NODE": node, "UNICRON_HARDWARE": hardware, "UNICRON_PARENT_DEATH": "1"}
        mine["UNICRON_NATS_CREDENTIAL"] = str(credential.with_name(f"{node}.json"))
        environment = {**agent.environ(), **mine}
        process = psutil.Popen(agent.cmdline(), env=environment, cwd=agent.cwd())
        self._until(lambda: self._usable(node), f"node {node} has joined")
        return process

    def _agent(self, node: str) -> psutil.Process:
        def serves(process: psutil.Process) -> bool:
            return process.environ().get("UNICRON_NODE") == node and "agent" in " ".join(process.cmdline())

        return next(process for process in self._stack.children() if serves(process))

    def _usable(self, node: str) -> bool:
        items = self._client.get("/v1/nodes", params={"limit": 100}).raise_for_status().json()["items"]
        return any(item["name"] == node and item["state"] == "ready" for item in items)

    def _trains_at(self, name: str, step: int) -> bool:
        task = self.task(name)
        return bool(task["step"] >= step and task["state"] in ("running", "succeeded"))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until_blocking(condition, what, limit_s=WAIT_S)
        print(f"  {what}", flush=True)


@contextlib.contextmanager
def running(python: Path, run_dir: Path, **settings: object) -> Iterator[Cluster]:
    """Start ``unicron up`` with two nodes of two workers; it has stopped when the context ends."""
    corpus = run_dir / "corpus.txt"
    run_dir.mkdir(parents=True, exist_ok=True)
    corpus.write_text("".join(f"Line {i} of a text that a small model may learn.\n" for i in range(4000)))
    environment = {**os.environ, **{f"UNICRON_{name.upper()}": str(value) for name, value in settings.items()}}
    arguments: list[str | Path] = ["up", "--run-dir", run_dir, "--port", "0", "--nodes", "2", "--workers-per-node", "2"]
    command: list[str | Path] = [python, "-P", "-m", "cli.main", *arguments]
    process = subprocess.Popen(command, env=environment, cwd=run_dir, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if len(ready) != 2 or ready[0] != "ready":
            raise SystemExit(f"the stack did not start; see {run_dir}/services")
        yield Cluster(psutil.Process(process.pid), ready[1], corpus, python)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=WAIT_S)
