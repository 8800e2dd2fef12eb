"""What agents tell the detector over core NATS: urgent signals (requests, acknowledged) and heartbeats (published).

Signals go to ``SIGNALS`` as requests: the detector answers once what follows from them is in the log, and an agent
repeats one until it is answered (same ``signal_id``: a repeat has no effect). Heartbeats are never repeated.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.model import Model

SIGNALS = "unicron.signals"
"""Subject of signals (request/reply; the reply is ``b"+"``)."""

HEARTBEATS = "unicron.heartbeats"
"""Subject prefix; an agent publishes to ``unicron.heartbeats.<node>``."""

RECONNECT_GRACE_S = 2.0
"""After the bus was away each agent is given this much more: clients reconnect within about 0.2 s, one that had to
resolve a name or start a new TCP connection on a busy machine takes longer."""


class SignalBase(Model):
    """Who says it and when. ``occurred_at``: when the agent learned it, ``signal_id``: a UUID."""

    signal_id: str
    node: str
    incarnation: str
    occurred_at: datetime


class RankSignal(SignalBase):
    """A signal about one rank."""

    task: str
    worker: str
    generation: int
    rank: int | None
    step: int


class ProcessExited(RankSignal):
    """A rank's process ended without being told to. ``exit_code`` is negative for a signal's number."""

    kind: Literal["process-exited"] = "process-exited"
    pid: int
    exit_code: int
    last_output: str = ""
    """The end of what it wrote, for the reader of the incident."""


class RankRaised(RankSignal):
    """A rank caught an exception. ``cause``: exception, communication (a peer's sockets broke) or non_finite."""

    kind: Literal["rank-raised"] = "rank-raised"
    cause: Literal["exception", "communication", "non_finite"]
    error: str
    detail: str
    traceback: str


class RankCheckpointed(RankSignal):
    """A complete checkpoint was written."""

    kind: Literal["rank-checkpointed"] = "rank-checkpointed"
    path: str


class RankStopped(RankSignal):
    """The task stopped at a boundary as asked (sent for rank 0)."""

    kind: Literal["rank-stopped"] = "rank-stopped"
    path: str


class RankFinished(RankSignal):
    """The task did its last step (sent for rank 0)."""

    kind: Literal["rank-finished"] = "rank-finished"
    samples_sha256: str
    parameters_path: str
    loss: float | None


Signal = Annotated[
    ProcessExited | RankRaised | RankCheckpointed | RankStopped | RankFinished, Field(discriminator="kind")
]
SIGNAL: TypeAdapter[Signal] = TypeAdapter(Signal)


class WorkerStatus(Model):
    """One worker slot. ``phase`` as in ``unicron.protocol.PHASES``; ages in seconds before ``sent_at``.

    ``process_state``: the kernel's letter for the process (R, S, D, T, Z), evidence for a hang.
    """

    worker: str
    state: Literal["idle", "starting", "ready", "training", "waiting"] = "idle"
    task: str | None = None
    generation: int | None = None
    rank: int | None = None
    pid: int | None = None
    step: int = 0
    phase: str | None = None
    micro_batch: int | None = None
    progress_age_s: float | None = None
    starved_s: float = 0.0
    """How much of ``progress_age_s``, at most, its main thread was ready to run and had no CPU."""
    hold_age_s: float | None = None
    """How long ago it was told to leave its step; None if it was not, or has done so."""
    step_s: float | None = None
    """Duration of the last completed step."""
    steps_timed: int = 0
    """Completed steps of this generation."""
    loss: float | None = None
    process_state: str | None = None


class Heartbeat(Model):
    """A node lives. ``incarnation`` is new for every start of an agent."""

    node: str
    incarnation: str
    agent_pid: int
    sequence: int
    sent_at: datetime
    interval_s: float
    domain: str = "default"
    """Failure domain (rack, zone) of the node."""
    hardware: str = "cpu"
    """Kind of the node's workers."""
    workers: list[WorkerStatus]
