"""Settings of all services: environment variables ``UNICRON_*``, with defaults and the reasons for them.

The ``main`` of a shell reads them once (``read_settings``) and passes them down; no core reads them. The parameters
that decisions use go into the log (``shared.events.union.ClusterConfigured``).
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.errors import InvalidInput
from shared.names import Label, Name, host_label
from shared.settings.endpoints import DEFAULT_SERVER, check_servers, listening
from shared.settings.escalation import EscalationLimits
from shared.tasks.specification import CHECKPOINT_URL

Directories = Annotated[str, Field(pattern=r"^\s*(/[^,\x00]*(,\s*/[^,\x00]*)*)?$")]
"""Absolute paths, separated by commas."""

Seconds = Annotated[float, Field(gt=0, le=86_400 * 365)]

logger = logging.getLogger(__name__)

PREFIX = "UNICRON_"

LIKENESS = 0.9
"""Ratio (``difflib.SequenceMatcher``) from which a name counts as a slip. No variable that something else reads (ranks,
tests, the command line) comes so near to a setting."""

MAX_UID = 2**32 - 2
"""Largest user id of Linux; the next one, -1 as an unsigned number, stands for "no change"."""


@dataclass(frozen=True, slots=True)
class Order:
    """A rule about two settings: ``lower`` must be ``less`` (or at most ``equal``), because ``otherwise`` holds."""

    lower: str
    relation: Literal["less", "equal"]
    upper: str
    otherwise: str

    def problem(self, settings: Settings) -> dict[str, Any] | None:
        """Return the contradiction as field, value and problem; None if the settings agree with the rule."""
        lower, upper = getattr(settings, self.lower), getattr(settings, self.upper)
        if lower < upper or (self.relation == "equal" and lower == upper):
            return None
        allowed = "less than" if self.relation == "less" else "at most"
        text = f"must be {allowed} {self.upper}, which is {upper:g}: otherwise {self.otherwise}"
        return {"field": self.lower, "value": lower, "problem": text}


ORDERS = (
    Order("heartbeat_interval_s", "less", "node_timeout_s", "every node is declared lost between two heartbeats"),
    Order(
        "node_timeout_s",
        "less",
        "command_timeout_s",
        "commands to a lost node time out before its loss is noticed, and its workers are blamed",
    ),
    Order(
        "command_timeout_s",
        "less",
        "resume_timeout_s",
        "commands that wait for a training step time out before those that do not",
    ),
    Order(
        "hang_floor_s",
        "equal",
        "collective_floor_s",
        "the limit of a collective is hang_floor_s and collective_floor_s has no effect",
    ),
    Order(
        "stop_floor_s", "equal", "hang_floor_s", "a stopped process counts as hanging before stop_floor_s has passed"
    ),
    Order("stop_factor", "equal", "hang_factor", "a stopped process counts as hanging before stop_factor is reached"),
    Order(
        "collective_floor_s",
        "equal",
        "slow_region_timeout_s",
        "a slow region, where no mean step applies, has a shorter limit than a collective",
    ),
    Order(
        "slow_region_timeout_s",
        "less",
        "resume_timeout_s",
        "a resume or a drain times out before the rank that hangs in a slow region is found",
    ),
    Order(
        "slow_region_timeout_s",
        "less",
        "collective_timeout_s",
        "the ranks' collectives time out before the rank that hangs in a slow region is found",
    ),
    Order(
        "slow_region_timeout_s",
        "less",
        "restart_window_s",
        "hangs in a slow region never repeat within the window, and are restarted for ever",
    ),
)
"""The order of the settings that are compared with one another.

``orphan_grace_s`` is in none: a lost node's ranks are fenced by their generation, however long they live.
"""


class Settings(BaseSettings, EscalationLimits):
    """All settings, with units in their names. ``ORDERS`` relates them to one another."""

    model_config = SettingsConfigDict(env_prefix="UNICRON_", frozen=True, extra="ignore", hide_input_in_errors=True)

    run_dir: Path = Path(".unicron")
    nats_url: str = "nats://127.0.0.1:4222"
    """Where NATS is: ``nats://HOST:PORT``, or ``tls://``; several servers of one NATS cluster are separated by commas.
    Where it is not set, the servers that the credential names count."""
    nats_credential: Path | None = None
    """File with which this process proves to NATS who it is (``shared.bus.credentials``)."""
    nats_credential_fd: int | None = Field(default=None, ge=3)
    """Descriptor of the same, opened by whoever started this process; it counts before ``nats_credential``. The user of
    this process then needs no right to the file. Each supervisor passes the credential to its agents in this way."""
    nats_ca_file: Path | None = None
    """Certificates (PEM) of those who vouch for the NATS servers (``tls://``); none: those in the credential, or else
    the system's."""
    nats_keys: Path | None = None
    """The key directory (``unicron keys``, ``unicron node``): who may use NATS; none: ``<run_dir>/nats/keys``, where
    the embedded stack has it."""
    connect_timeout_s: Seconds = 60.0
    """How long a service or an agent that starts waits for NATS and for the log's database. NATS and the database may
    be starting, or failing over, which takes half a minute; after this time the process ends, so that a wrong address
    shows."""
    log_url: str = ""
    """SQLAlchemy URL of the log; empty: SQLite at ``<run_dir>/log.db``."""
    log_segments: Path | None = None
    """Folder of the segments of a log that was cut over (docs/log.md); none: the folder to which it was archived."""

    log_stream_replicas: int = Field(default=1, ge=1, le=5)
    """On how many servers of a NATS cluster the log's stream is kept; JetStream allows five. A stream that has fewer
    gets more; one that has more keeps them. The stream can be rebuilt from the table, so this decides whether the
    services wait while one NATS server is away, and not whether events are lost."""

    state_snapshot_events: int = Field(default=10_000, ge=0)
    """After how many events detector, planner and transition each write their state to ``<run_dir>/state-snapshots``,
    from which they start (docs/log.md). A service folds so many events in about a second. 0: no snapshot is written or
    read."""

    log_key_file: Path | None = None
    """File with the key by which the api signs the head of the log once a day; none: it signs nothing. The key is only
    worth what its secrecy is: who can write the log's database must not be able to read it."""

    checkpoint_url: str = Field(default="", pattern=f"^$|{CHECKPOINT_URL}")
    """An fsspec URL (``s3://bucket/prefix``) for the checkpoints of all tasks that name no place of their own, each in
    a folder of its name; the api reads it. Empty: below ``run_dir``, which the nodes of a task then have to share."""

    memory_dir: Path = Path("/dev/shm")  # nosec B108 # each user has a folder of mode 0700 there
    """Folder of the in-memory snapshots of a node's ranks: a file system in memory, with room for a few times the state
    of the shards that the node trains. A container needs a volume of that size there."""

    host: str = "127.0.0.1"
    port: int = Field(default=8642, ge=0, le=65_535)
    allowed_hosts: str = ""
    """Names, separated by commas, under which clients may reach the api besides ``localhost``, this machine's host name
    and every address: those of a proxy or of a DNS alias. A request for another name is refused: a page on a site that
    resolves to this machine would send it."""
    tokens_file: Path | None = None
    """Who may use the api from elsewhere (``unicron token``); none: ``<run_dir>/tokens.json``."""
    tls_certificate: Path | None = None
    """Certificate chain of the api, PEM; with ``tls_key`` the api speaks HTTPS."""
    tls_key: Path | None = None
    insecure: bool = False
    """Whether the api may listen on other addresses than loopback without TLS: behind a proxy that has it, or on a
    network that nobody else is on. Tokens are asked for all the same."""
    requests_per_s: float = Field(default=200.0, ge=0)
    """Requests that the api takes from one peer in a second, in the long run: a user of this machine, a token or an
    address. A hundred times what a dashboard asks for; one core answers a few hundred. 0: any number. Probes are not
    counted."""
    input_dirs: Directories = ""
    """Directories on the nodes, separated by commas: below them are the paths (``data``, ``script``,
    ``checkpoint.directory``) that a submission may name whose actor may not operate. Empty: none is allowed. Who may
    operate may name any path. The api reads it."""
    secret_dirs: Directories = ""
    """Directories on this node, separated by commas, below which the secrets of tasks are. Empty: any file that the
    agent can read; with ``rank_uids``, none. The agent reads it."""
    interpreters: Directories = ""
    """Pythons on this node, separated by commas, in which ranks run: each has the library and torch. The first is that
    of tasks that name none. Empty: the agent's own, and any that a task names; with ``rank_uids``, the agent's alone.
    The agent reads it."""
    allow_shipped_code: bool = False
    """Whether tasks run here whose code comes along (``unicron run --ship``): then whoever may submit runs any code as
    the ranks' user, also where ``input_dirs`` of the api names which scripts there are. The agent reads it."""
    preflight: bool = False
    """Whether this node is measured before it joins, and before it is used again (docs/deploy.md): that takes half a
    minute at most. The agent reads it."""
    server: str = DEFAULT_SERVER
    """Address of the API for the CLI, and in the links of notices."""
    notices_file: Path | None = None
    """File (YAML) of those who are told what goes wrong (docs/monitoring.md#notices). None: nobody is. The api reads
    it."""

    log_format: Literal["text", "json"] = "text"
    """Log lines for people, or as JSON with the ids of task and incident (``shared.service.log_lines``)."""
    metrics_address: str = ""
    """Where this process serves its metrics (``/metrics``, docs/monitoring.md): ``HOST:PORT``, or ``PORT`` of the
    loopback address. Empty: nowhere. Each process on a machine needs a port of its own. The api has them at its own
    address."""

    node: Name = Field(default_factory=host_label, validate_default=False)
    """Name of this node: 1 to 63 lower-case letters, digits and hyphens, like the name of a task. Default: the host
    name up to the first dot, in lower case. The agent alone needs it, and refuses a host name that is no node name."""
    domain: Label = "default"
    hardware: Label = ""
    """Kind of this node's workers, which names a profile of the throughput model; empty: from the driver, else
    ``cpu``."""
    workers_per_node: int = Field(default=2, ge=1, le=1024)
    address: str = ""
    """Address of this node: an IP address, a host name or a network interface of this machine. Empty: the local end of
    the agent's connection to NATS."""
    store_host: str = ""
    """Address under which other nodes reach a rendezvous store on this node; empty: ``address``."""
    rank_uids: str = ""
    """User ids ``FIRST-LAST`` that nobody else on the nodes has: each task's processes run under one of them, which
    follows from the task's name, and under the group of the same number. The agent then has to be root. A large range
    (``1000000000-1999999999``) keeps two tasks from having the same. Empty: they run as the agent's user, and can do
    what it can."""

    rank_output_bytes: int = Field(default=64 << 20, ge=0)
    """How much of a rank's output stays on its node, in bytes: at least the newest half of it. A rank prints some lines
    a step, so this is weeks of them, and what a loop of errors prints in seconds. 0: all. The agent reads it."""
    rank_output_files: int = Field(default=8, ge=0)
    """How many of a worker's processes, the newest ones, have their output of one task kept on the node: those of the
    incidents that are still looked into. 0: all. The agent reads it."""

    lease_s: Seconds = 2.0
    """How long the active detector, planner or transition service says nothing in the log's database before one that
    stands by takes over; where it is known to have ended, one takes over at once. Above the longest pause of a busy
    machine, and low enough that a fault is planned within 3 s."""
    heartbeat_interval_s: Seconds = 0.25
    """Four heartbeats a second cost four small messages; the interval bounds how late a lost node is noticed."""
    node_timeout_s: Seconds = 1.5
    """Six missed heartbeats; the longest gap measured with both cores of a small machine busy was below 1 s. Once a
    node's heartbeats are known, its limit is between 0.8 and 2 times this."""
    hang_factor: float = Field(default=3.0, gt=1)
    """Multiple of the mean step after which a rank hangs (Unicron paper, section 4.1: three times the average
    iteration), until the distribution of its steps is known (docs/detector.md)."""
    hang_floor_s: Seconds = 0.5
    """Least limit for a hang, counted in time in which the rank could have run: on busy machines short steps vary by
    more than ``hang_factor``."""
    stop_factor: float = Field(default=3.0, gt=1)
    """Multiple of the mean step for which a process may be stopped (SIGSTOP), until the distribution is known."""
    stop_floor_s: Seconds = 0.5
    """Least limit for a stopped process. A profiler or a snapshot stops one for a shorter time."""
    collective_floor_s: Seconds = 2.0
    """Least limit for a collective that all ranks have entered."""
    slow_region_timeout_s: Seconds = 120.0
    """Limit inside slow regions (set-up, checkpoint, between two steps, a task's first step), where no mean applies."""
    busy_timeout_s: Seconds = 240.0
    """Hard limit for a rank that compiles or evaluates, by its processor time or its device; at least the one above."""
    restart_window_s: Seconds = 600.0
    """Time within which equal failures of a task at the same step count towards its ``max_restarts``."""
    progress_interval_s: Seconds = 5.0
    """Shortest interval at which a task's progress is summarised in the log; it grows while the rate is the same."""

    fault_injection: bool = False
    """Whether faults may be injected (``unicron inject``): they cost steps, and can cost a node. The api and the agents
    read it; off unless somebody tests."""

    command_timeout_s: Seconds = 60.0
    """Time-out of an agent's reply to a command that does not wait for a training step."""
    resume_timeout_s: Seconds = 300.0
    """Time-out of an agent's reply to a command that waits for a training step: a first step, a hold, or a drain."""
    collective_timeout_s: Seconds = 600.0
    """Time-out of the ranks' process groups: a last resort behind the hang detection."""
    orphan_grace_s: Seconds = 5.0
    """How long a rank trains on while nothing on its node listens for it. Between two agents the supervisor does."""

    drain_timeout_s: float = Field(default=60.0, ge=0, le=86_400)
    """How long tasks may take to move away from a node that is drained; what is left then saves its state and gives up
    its workers. A move waits for the step in progress and for processes elsewhere, whose imports take 5-10 s. An agent
    that is asked to end leaves after twice this time at the latest; 0: it leaves at once."""

    mtbf_node_s: Seconds = 20 * 86_400.0
    """Mean time between failures of a node until the log has failures: of the order of one failure per node in three
    weeks (Llama 3 405B: 419 interruptions in 54 days on 2,048 nodes is one per 264 node-days; Unicron's trace-b has
    more)."""
    throughput_hysteresis: float = Field(default=0.2, ge=0, lt=1)
    """Relative change below which a measured throughput leaves the model's correction as it is."""
    transition_prior_s: Seconds = 2.0
    """Duration of a transition that is assumed until one has been measured."""
    worker_flop_per_s: float = Field(default=5e9, gt=0)
    """Rate of a worker until its steps are measured: of the order of one CPU core in fp32 on small matrices."""
    storage_bytes_per_s: float = Field(default=1e9, gt=0)
    """Rate at which a worker reads a checkpoint until that is measured: one client of a parallel file system has it."""
    starvation_s: float = Field(default=4 * 3600.0, ge=0)
    """A task that has waited this long comes before running ones; 0: it waits for ever. A pause costs less than a
    percent of the work done in four hours."""
    allow_pausing: bool = False
    """Whether a running task may lose all its workers to a task with a higher weight."""
    memory_copies: bool = True
    """Whether plans count on snapshots in memory (``checkpoint.memory_every``) where a replica spans several workers:
    transitions then cost a transfer between memories, and otherwise a restore, which is an upper bound."""
    price_per_worker_hour: float = Field(default=2.0, ge=0)
    """Price of an hour of one worker, in ``currency``."""
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Kind of workers -> price of a worker-hour, in place of ``price_per_worker_hour``; rent, or energy alone."""
    value_per_eflop: float = Field(default=0.0, ge=0)
    """What a weighted EFLOP (1e18 model FLOP times the task's weight) is worth, in ``currency``. Plans then leave
    workers unused that cost more than they bring. 0: plans know no prices."""
    currency: str = "USD"

    @field_validator("nats_url")
    @classmethod
    def _check_nats_url(cls, value: str) -> str:
        try:
            return check_servers(value)
        except InvalidInput as err:
            raise PydanticCustomError("nats-url", "{text}", {"text": err.detail}) from err

    @field_validator("metrics_address")
    @classmethod
    def _check_metrics_address(cls, value: str) -> str:
        try:
            listening(value)
        except InvalidInput as err:
            raise PydanticCustomError("listening", "{text}", {"text": err.detail}) from err
        return value

    @field_validator("rank_uids")
    @classmethod
    def _check_rank_uids(cls, value: str) -> str:
        try:
            uid_range(value)
        except ValueError as err:
            raise PydanticCustomError("rank-uids", "{text}", {"text": str(err)}) from err
        return value

    @property
    def nats_servers(self) -> list[str]:
        """URL of each NATS server."""
        return self.nats_url.split(",")

    @property
    def token_file(self) -> Path:
        """Where the api's tokens are."""
        return self.tokens_file or self.run_dir / "tokens.json"

    @property
    def key_directory(self) -> Path:
        """Where the keys of those are who may use NATS."""
        return self.nats_keys or self.run_dir / "nats" / "keys"

    @property
    def allowed_host_names(self) -> list[str]:
        """Each of ``allowed_hosts``."""
        return [name for part in self.allowed_hosts.split(",") if (name := part.strip())]

    @property
    def input_directories(self) -> list[Path]:
        """Each of ``input_dirs``."""
        return _directories(self.input_dirs)

    @property
    def rank_interpreters(self) -> list[str]:
        """Each of ``interpreters``."""
        return [str(path) for path in _directories(self.interpreters)]

    @property
    def secret_directories(self) -> list[Path]:
        """Each of ``secret_dirs``."""
        return _directories(self.secret_dirs)

    @model_validator(mode="after")
    def _check_orders(self) -> Self:
        problems = [problem for order in ORDERS if (problem := order.problem(self)) is not None]
        if problems:
            raise PydanticCustomError("contradiction", "{text}", {"text": _text(problems), "problems": problems})
        return self

    @property
    def log_database_url(self) -> str:
        """SQLAlchemy URL of the log."""
        return self.log_url or f"sqlite:///{self.run_dir.resolve() / 'log.db'}"


def read_settings(**given: Any) -> Settings:
    """Return the settings: those given, the others from the environment, or else their defaults.

    Raises:
        InvalidInput: a value is not allowed, or two settings contradict one another; one entry for each problem.
    """
    warn_of_slips(Settings.model_fields)
    try:
        return Settings(**given)
    except ValidationError as err:
        problems = [problem for item in err.errors(include_url=False) for problem in _problems(item)]
        raise InvalidInput(f"settings refused: {_text(problems)}", problems) from err


def _directories(text: str) -> list[Path]:
    return [Path(path) for part in text.split(",") if (path := part.strip())]


def _problems(item: Any) -> list[dict[str, Any]]:
    """Return a complaint of pydantic as entries of ``InvalidInput.errors``."""
    if item["type"] == "contradiction":
        return list(item["ctx"]["problems"])
    field = ".".join(str(part) for part in item["loc"])
    value = item["input"] if isinstance(item["input"], str | int | float | bool) else str(item["input"])
    return [{"field": field, "value": value, "problem": item["msg"]}]


def _text(problems: list[dict[str, Any]]) -> str:
    return "; ".join(f"{p['field']}: {p['problem']} (given: {p['value']!r})" for p in problems)


def slips(environment: Iterable[str], settings: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each variable that is no setting, and the setting that it is most like, where it is very much like one.

    Args:
        environment: names of variables.
        settings: names of settings, as in Python.
    """
    known = [f"{PREFIX}{name.upper()}" for name in settings]
    for name in sorted({name for name in environment if name.startswith(PREFIX)} - {*known}):
        if found := difflib.get_close_matches(name, known, n=1, cutoff=LIKENESS):
            yield name, found[0]


def warn_of_slips(settings: Iterable[str]) -> None:
    """Log each slip in the environment of this process."""
    for name, meant in slips(os.environ, settings):
        logger.warning("%s is no setting and has no effect; did you mean %s?", name, meant)


def uid_range(text: str) -> range:
    """Return the user ids that a text names, ``FIRST-LAST``; none if it is empty.

    Raises:
        ValueError: not a range of user ids, or one with root's.
    """
    if not text:
        return range(0)
    first, dash, last = text.partition("-")
    allowed = f"FIRST-LAST, two user ids from 1 to {MAX_UID}, the smaller one first"
    if not dash or not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in (first, last)):
        raise ValueError(f"not {allowed}")
    found = range(int(first), int(last) + 1)
    if not found or found.start < 1 or int(last) > MAX_UID:
        raise ValueError(f"not {allowed}")
    return found
