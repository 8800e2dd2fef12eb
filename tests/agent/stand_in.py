"""The real fork server whose ranks follow a script in place of training: it starts in milliseconds.

Its ranks speak ``unicron.protocol.messages`` over the agent's socket from real processes. ``BEHAVIOUR`` in a rank's
environment: ``train`` (default), ``raise`` (an exception at step 3), ``finish`` (after step 5), ``unsayable`` (reports
at step 2 a checkpoint whose path is not UTF-8), ``die-early`` (before it attaches), ``die-joining`` (when configured),
``refuse`` (cannot run the task, and reports that as soon as it is attached), ``babble`` (before it trains, sends lines
that are no messages), ``junk`` (while it trains, sends lines of every kind with wrong parts), ``newer`` (speaks a later
version of the protocol), ``flood`` (prints half a megabyte in each step), ``segfault`` (in native code at step 3),
``digest`` (prints that of the variable ``API_KEY``, and trains), ``code`` (prints where code has come along, or why it
is refused, and trains).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import select
import socket
import sys
from typing import Any

from unicron import forkserver
from unicron.protocol.messages import (
    Checkpointed,
    Configure,
    Drain,
    Drained,
    Finished,
    Held,
    Hello,
    Hold,
    Incompatible,
    Message,
    Progress,
    Quit,
    Raised,
    Received,
    Resumed,
    Stop,
    Stopped,
    StopRefused,
    decode,
    encode,
)
from unicron.protocol.versions import OLDEST

STEP_S = 0.02

JUNK = {
    "hello": ("version", "task", "worker", "pid"),
    "progress": ("generation", "rank", "step", "phase", "loss", "duration_s"),
    "held": ("generation", "step"),
    "drained": ("generation", "step"),
    "resumed": ("generation", "step", "source", "phases", "deal"),
    "checkpointed": ("generation", "step", "path"),
    "checkpoint-failed": ("generation", "rank", "step", "reason"),
    "copies": ("generation", "rank", "step", "lack"),
    "configure": ("generation", "stage", "members"),
    "received": (),
}
"""The messages that do not end a rank, and fields of theirs."""

WRONG: list[Any] = [
    None, True, -1, 1 << 53, 10**400, 1e300, float("nan"), "", "\0", "/c\0", "\ud800", "x" * 5000, "y" * (3 << 20),
    [], {}, [[]], {"": -1.0}, {"a": float("inf")}, "resumed", "ended",
]  # fmt: skip
"""What junk has in place of right values; the longest is longer than any line may be."""


class Rank:
    def __init__(self) -> None:
        self.behaviour = os.environ.get("BEHAVIOUR", "train")
        self.generation, self.rank, self.step = 0, 0, 0
        self.training = False
        self.unanswered: list[Message] = []
        self.attach()

    def attach(self) -> None:
        """Connect to the agent, or to its successor, which gets again what was not answered."""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect("\0" + os.environ["UNICRON_SOCKET"].removeprefix("@"))
        self.buffer = b""
        task, worker = os.environ["UNICRON_TASK"], os.environ["UNICRON_WORKER"]
        version = 99 if self.behaviour == "newer" else OLDEST
        hello = Hello(version=version, task=task, worker=worker, pid=os.getpid())
        for message in (hello, *self.unanswered):
            self.socket.sendall(encode(message))

    def send(self, message: Message) -> None:
        if not isinstance(message, Progress):
            self.unanswered.append(message)
        with contextlib.suppress(BrokenPipeError):  # the end of the connection is noticed by reading, too
            self.socket.sendall(encode(message))

    def run(self) -> int:
        print("a rank of", os.environ["UNICRON_TASK"], flush=True)
        if self.behaviour == "refuse":
            return self.refuse()
        if self.behaviour == "digest":
            print("digest:", hashlib.sha256(os.environ["API_KEY"].encode()).hexdigest(), flush=True)
        if self.behaviour == "code":
            print("code:", os.environ.get("UNICRON_CODE_REFUSED") or os.environ["UNICRON_CODE_DIRECTORY"], flush=True)
        while True:
            ready, _, _ = select.select([self.socket], [], [], STEP_S if self.training else None)
            if ready:
                data = self.receive()
                if not data:
                    self.attach()
                    continue
                self.buffer += data
                while b"\n" in self.buffer:
                    line, self.buffer = self.buffer.split(b"\n", 1)
                    code = self.take(decode(line))
                    if code is not None:
                        return code
            elif (code := self.compute()) is not None:
                return code

    def receive(self) -> bytes:
        with contextlib.suppress(ConnectionResetError):
            return self.socket.recv(65536)
        return b""

    def last_words(self) -> None:
        """Wait until all that was said is answered."""
        while self.unanswered:
            data = self.receive()
            if not data:
                self.attach()
            self.buffer += data
            while b"\n" in self.buffer:
                line, self.buffer = self.buffer.split(b"\n", 1)
                self.take(decode(line))

    def take(self, message: Message) -> int | None:
        match message:
            case Received():
                del self.unanswered[:1]
            case Configure():
                if self.behaviour == "die-joining":
                    return 3
                if self.behaviour == "miss-a-peer":
                    self.miss_a_peer(message)
                    return None
                self.generation, self.rank, self.training = message.generation, message.rank, True
                if self.behaviour == "babble":
                    self.babble()
                self.progress("setup")
                source = {1: "initial"}.get(message.generation, "own")
                self.send(Resumed(generation=self.generation, step=self.step, source=source, phases={"rebuild": 0.1}))
            case Hold():
                print("lost:", *message.lost, flush=True)
                self.training = False
                self.send(Held(generation=self.generation, step=self.step))
            case Drain():
                self.training = False
                self.send(Drained(generation=self.generation, step=self.step))
            case Stop() if self.behaviour == "cannot-save" and not message.lose_steps:
                reason = "no room" if self.rank == 0 else ""
                self.send(StopRefused(generation=self.generation, rank=self.rank, step=self.step, reason=reason))
            case Stop():
                path = "/checkpoint" if self.rank == 0 else ""
                self.send(Stopped(generation=self.generation, rank=self.rank, step=self.step, path=path))
                return 0
            case Quit():
                return 0
            case Incompatible():
                print(message.reason, flush=True)
                return 76
        return None

    def babble(self) -> None:
        for line in (
            b"",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"message":"later","x":1}',
            b'{"message":"progress","generation":"\\u0000","rank":0,"step":1,"phase":"begun"}',
            b'{"message":"progress","generation":1,"rank":0,"step":' + b"9" * 400 + b',"phase":"begun"}',
            b'{"message":"progress","generation":1,"rank":0,"step":1,"phase":"\\ud800"}',
            b'{"message":"raised","generation":{}}',
        ):
            self.socket.sendall(line + b"\n")

    def junk(self) -> None:
        """Send a line that is a message but for one part of it, or is none at all."""
        draw = random.Random(self.step)
        kind = draw.choice(sorted(JUNK))
        fields: dict[str, Any] = {"message": kind, **dict.fromkeys(JUNK[kind], 1)}
        for _ in range(draw.randrange(3)):
            fields[draw.choice(sorted(fields))] = draw.choice(WRONG)
        line = json.dumps(fields).encode()
        line = draw.choice([line, line, line[: draw.randrange(len(line))], draw.randbytes(99).replace(b"\n", b"")])
        with contextlib.suppress(BrokenPipeError):
            self.socket.sendall(line + b"\n")

    def refuse(self) -> int:
        error, detail = "ModuleNotFoundError", "No module named 'missing'"
        text = f"Traceback ...\n{error}: {detail}"
        self.send(Raised(generation=0, rank=0, step=0, kind="refused", error=error, detail=detail, traceback=text))
        return 1

    def miss_a_peer(self, configure: Configure) -> None:
        """Slot 1 never joins; slot 0 reports that it misses a peer."""
        if configure.rank == 0:
            about: dict[str, Any] = {"error": "DistStoreError", "detail": "wait timeout", "traceback": "Traceback ..."}
            self.send(Raised(generation=configure.generation, rank=0, step=0, kind="communication", **about))

    def compute(self) -> int | None:
        if self.behaviour == "raise" and self.step == 2:
            print("Traceback: the end of the output", flush=True)
            about: dict[str, Any] = {"error": "ValueError", "detail": "bad sample", "traceback": "Traceback ..."}
            self.send(Raised(generation=self.generation, rank=self.rank, step=3, kind="exception", **about))
            return 1
        if self.behaviour == "segfault" and self.step == 2:
            ctypes.string_at(0)
        if self.behaviour == "flood":
            print("x" * (1 << 19), flush=True)
        for phase in ("begun", "compute", "reduce"):
            self.progress(phase)
        if self.behaviour == "junk":
            self.junk()
        self.step += 1
        ended = Progress(
            generation=self.generation, rank=self.rank, step=self.step, phase="ended", loss=2.0, duration_s=STEP_S
        )
        self.send(ended)
        if self.behaviour == "unsayable" and self.step == 2:
            self.send(Checkpointed(generation=self.generation, step=self.step, path=os.fsdecode(b"/\xff")))
        if self.behaviour == "finish" and self.step == 5:
            if self.rank == 0:
                self.send(Checkpointed(generation=self.generation, step=self.step, path="/last"))
            result = {"samples_sha256": "abc", "parameters_path": "/p"} if self.rank == 0 else {}
            self.send(Finished(generation=self.generation, rank=self.rank, step=self.step, **result))  # type: ignore[arg-type]
            return 0
        return None

    def progress(self, phase: str) -> None:
        self.send(Progress(generation=self.generation, rank=self.rank, step=self.step + 1, phase=phase))


def train(request: dict[str, Any]) -> int:
    os.environ["UNICRON_TASK"] = request["task"]
    if os.environ.get("BEHAVIOUR") == "die-early":
        print("no such library", flush=True)
        return 7
    rank = Rank()
    code = rank.run()
    if code == 0:
        rank.last_words()
    return code


def store(host: str, writing: int) -> int:
    listener = socket.create_server((host, 0))
    os.write(writing, str(listener.getsockname()[1]).encode())
    os.close(writing)
    select.select([], [], [])
    return 0


if __name__ == "__main__":
    forkserver._train, forkserver._store = train, store
    sys.argv.append("--no-preload")
    sys.exit(forkserver.main())
