"""Settings of all services: environment variables ``UNICRON_*``, defaults with their reasons.

Read once by a shell's ``main`` and passed down; no core reads them. What decisions use goes into the log
(``ClusterConfigured``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

Seconds = Annotated[float, Field(gt=0, le=86_400 * 365)]


class Settings(BaseSettings):
    """Every knob, with units in its name."""

    model_config = SettingsConfigDict(env_prefix="UNICRON_", frozen=True, extra="ignore")

    run_dir: Path = Path(".unicron")
    nats_url: str = "nats://127.0.0.1:4222"
    nats_token: str = ""
    log_url: str = ""
    """SQLAlchemy URL of the log; empty: SQLite at ``<run_dir>/log.db``."""

    memory_dir: Path = Path("/dev/shm")
    """Where a node's ranks keep in-memory copies of their state: a file system in memory, with room for a few times
    the state of the shards that the node trains. A container needs a volume of that size there."""

    host: str = "127.0.0.1"
    port: int = Field(default=8642, ge=0, le=65_535)
    server: str = "http://127.0.0.1:8642"
    """Where the CLI finds the API."""

    node: str = "n0"
    domain: str = "default"
    hardware: str = ""
    """Kind of this node's workers, a profile of the throughput model; empty: from the driver, else ``cpu``."""
    workers_per_node: int = Field(default=2, ge=1, le=1024)
    store_host: str = "127.0.0.1"
    """Address under which other nodes reach a rendezvous store on this node."""

    heartbeat_interval_s: Seconds = 0.25
    """Four a second: the cost is one small message; it bounds how late a lost node is noticed."""
    node_timeout_s: Seconds = 1.5
    """Six missed heartbeats. Detection of a lost node stays under 2 s; the longest gap seen with both cores of a
    small machine busy was below 1 s."""
    hang_factor: float = Field(default=3.0, gt=1)
    """Times the mean step (Unicron paper, section 4.1: three times the average iteration is a failure)."""
    hang_floor_s: Seconds = 0.5
    """No hang is declared sooner, counted in time in which the rank could have run: short steps vary by more than three
    times on busy machines."""
    stop_factor: float = Field(default=3.0, gt=1)
    """Times the mean step for which a process may be stopped (SIGSTOP)."""
    stop_floor_s: Seconds = 0.5
    """A profiler or a snapshot stops a process for less."""
    collective_floor_s: Seconds = 2.0
    """No collective that all ranks have entered is given up sooner."""
    slow_region_timeout_s: Seconds = 120.0
    """Limit inside known slow regions (set-up, checkpoint) where no mean step applies."""
    restart_window_s: Seconds = 600.0
    progress_interval_s: Seconds = 5.0
    """How often a task's progress is summarised into the log."""

    command_timeout_s: Seconds = 60.0
    """An agent's answer to one command that does not wait for a training step."""
    resume_timeout_s: Seconds = 300.0
    """First step of a generation, or a drain to the step boundary."""
    collective_timeout_s: Seconds = 600.0
    """Handed to the ranks' process groups: a last resort behind the hang detection."""
    orphan_grace_s: Seconds = 5.0
    """How long ranks outlive their agent."""

    mtbf_node_s: Seconds = 20 * 86_400.0
    """Prior until the log has failures of its own: of the order of one failure per node in three weeks (Llama 3
    405B: 419 interruptions in 54 days on 2,048 nodes is one per 264 node-days; Unicron's trace-b is harsher)."""
    throughput_hysteresis: float = Field(default=0.2, ge=0, lt=1)
    transition_prior_s: Seconds = 2.0
    worker_flop_per_s: float = Field(default=5e9, gt=0)
    """Of the order of what one CPU core reaches in fp32 on small matrices; measured steps replace it."""
    storage_bytes_per_s: float = Field(default=1e9, gt=0)
    """At which a worker reads a checkpoint until that was measured: of the order of one client of a parallel file
    system or object store."""
    starvation_s: float = Field(default=4 * 3600.0, ge=0)
    """A task that has waited this long comes before running ones; 0: it waits for ever. Long enough that a pause and
    its transition cost less than a percent of what runs in between."""
    allow_pausing: bool = False
    """Whether a running task may lose all its workers to a heavier one. Off: what runs, runs on."""
    price_per_worker_hour: float = Field(default=2.0, ge=0)
    currency: str = "USD"

    @property
    def log_database_url(self) -> str:
        """SQLAlchemy URL of the log."""
        return self.log_url or f"sqlite:///{self.run_dir.resolve() / 'log.db'}"
