"""Requests of the api to node agents about files on their machines: core NATS, ``unicron.files.<node>``.

An agent serves three kinds of files and no others: the output of ranks, the metrics that they have logged, and the
parameters of finished tasks (``shared.messages.task_folders``). About the files that a submission names an agent says
only whether a rank there could use them. Each request is answered by itself: a caller repeats what was lost, and reads
a file chunk by chunk. So do agents, which ask the api for the code that comes along with tasks.

A reply is one line of JSON, and after it the bytes that were read.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.bus.endpoints import Codec, Endpoint
from shared.bus.messages import MAX_INTEGER, REASON_CHARACTERS, Integer, Message
from shared.errors import NotFound, Unavailable, Undecodable, UnicronError
from shared.model import Model
from shared.names import FilePath, Name, WorkerName
from shared.tasks.code import Digest
from shared.tasks.secrets import Place

CHUNK_BYTES = 256 << 10
"""Most bytes of one reply: a quarter of the largest message that NATS allows by default, and 20 ms of a link of 100
Mbit/s, so that heartbeats on the same connection do not wait for long."""

LIST_LIMIT = 1000
"""Most files in one reply: about 100 KB of JSON. A caller asks again behind the last one."""

NODES_LIMIT = 10_000
"""Most nodes that one request names: above any cluster, and 640 KB at most."""

PATH_CHARACTERS = 4096
"""Longest path that a request names: PATH_MAX of Linux."""

Generation = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Offset = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Limit = Annotated[int, Field(ge=1, le=CHUNK_BYTES)]


class RankFile(Model):
    """The output of one process, or its metrics: of which generation, on which worker, and how much there is.

    The generation of output is that for which the process was started; metrics are of one generation.
    """

    generation: Generation
    worker: WorkerName
    size_bytes: Offset

    @property
    def key(self) -> tuple[int, str]:
        """What tells the file from the others of its task, and orders listings."""
        return self.generation, self.worker


class _List(Message):
    """List files of processes that ran on the workers of ``nodes``, behind generation and worker ``after``."""

    task: Name
    nodes: Annotated[list[Name], Field(max_length=NODES_LIMIT)]
    after: tuple[Integer, str] = (-1, "")


class _Read(Message):
    """Read a part of a file of one process."""

    task: Name
    generation: Generation
    worker: WorkerName
    offset: Offset
    limit: Limit = CHUNK_BYTES


class ListOutput(_List):
    """List the output of processes."""

    kind: Literal["list-output"] = "list-output"


class ReadOutput(_Read):
    """Read the output of one process.

    ``skips``: whether the reply may begin behind ``offset``, where what was there is left out (``FilesReply.offset``).
    ``since_s``: only what was printed from this time on, in seconds since the epoch, as far as that is known: the reply
    begins with the line behind the last size that was noted before then (``shared.machine.output_times``).
    """

    kind: Literal["read-output"] = "read-output"
    skips: bool = False
    since_s: Annotated[float, Field(allow_inf_nan=False)] | None = None


class ListMetrics(_List):
    """List the metrics that processes have logged."""

    kind: Literal["list-metrics"] = "list-metrics"


class ReadMetrics(_Read):
    """Read the metrics that one process has logged in a generation."""

    kind: Literal["read-metrics"] = "read-metrics"


class DescribeResult(Message):
    """Report size and digest of the parameters that a generation of a task left.

    A digest takes time: while it is not known, the reply is without it, and the caller asks again.
    """

    kind: Literal["describe-result"] = "describe-result"
    task: Name
    generation: Generation


class ReadResult(Message):
    """Read parameters that ``DescribeResult`` has described."""

    kind: Literal["read-result"] = "read-result"
    task: Name
    generation: Generation
    offset: Offset
    limit: Limit = CHUNK_BYTES


class CheckInputs(Message):
    """Report why a rank on this node could not use the files that a specification names.

    ``vocabulary``: the model's, which has to fit a text. ``task``: the task under whose user the agent looks at the
    files, if tasks have users of their own. ``directories``: folders below which the files have to be, wherever links
    lead; None: anywhere. ``secrets``: the variables that the agent would read for the task. ``python``: the Python in
    which the library is to run its processes; None: the node's own. ``ships``: whether the task's code comes along:
    relative paths are of its folder, which is not here yet.
    """

    kind: Literal["check-inputs"] = "check-inputs"
    task: Name | None = None
    data: Annotated[str, Field(max_length=PATH_CHARACTERS)]
    script: Annotated[str, Field(max_length=PATH_CHARACTERS)] | None = None
    vocabulary: Integer
    directories: list[FilePath] | None = None
    secrets: dict[str, Place] = Field(default_factory=dict)
    python: FilePath | None = None
    ships: bool = False

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Field and path of what has to be here."""
        named = (("data", self.data), ("script", self.script))
        return [(field, path) for field, path in named if path is not None and not (self.ships and path[:1] != "/")]


FilesRequest = Annotated[
    ListOutput | ReadOutput | ListMetrics | ReadMetrics | DescribeResult | ReadResult | CheckInputs,
    Field(discriminator="kind"),
]


class InputProblem(Model):
    """Why a field of a specification cannot be used on a node. ``allowed``: what could be used."""

    field: Annotated[str, Field(max_length=64)]
    problem: Annotated[str, Field(max_length=REASON_CHARACTERS)]
    allowed: Annotated[str, Field(max_length=REASON_CHARACTERS)] = ""


class FilesReply(Message):
    """The reply to a request.

    ``code``: for a failed request, that of the exception (``shared.errors``); ``detail``: why, for people. ``files``:
    those of a listing; ``more``: whether there are further ones. ``size_bytes``: the size of the file. ``offset``:
    where the bytes begin that were read; None: where the request asked for. ``version``: a text that changes when the
    file is changed. ``sha256``: digest of the file in hexadecimal, empty while it is not known. ``problems``: what is
    wrong with inputs.
    """

    ok: bool = True
    code: str = ""
    detail: str = ""
    files: Annotated[list[RankFile], Field(max_length=LIST_LIMIT)] = Field(default_factory=list)
    more: bool = False
    size_bytes: Integer = 0
    offset: Integer | None = None
    version: str = ""
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    problems: Annotated[list[InputProblem], Field(max_length=LIST_LIMIT)] = Field(default_factory=list)


FilesAnswer = tuple[FilesReply, bytes]
"""The reply to a request, and the bytes that were read."""


def failed(error: UnicronError) -> FilesAnswer:
    """Return the reply to a request that failed."""
    return FilesReply(ok=False, code=error.code, detail=error.detail[:REASON_CHARACTERS]), b""


class _FilesCodec(Codec[FilesAnswer]):
    """A line of JSON, and after it the bytes that were read."""

    def __init__(self) -> None:
        super().__init__(FilesReply, "a line of `FilesReply`, and the bytes that were read")
        self._head = Codec[FilesReply](FilesReply)

    def encode(self, message: FilesAnswer) -> bytes:
        reply, data = message
        return self._head.encode(reply) + b"\n" + data

    def decode(self, data: bytes) -> FilesAnswer:
        head, separator, rest = data.partition(b"\n")
        if not separator:
            raise Undecodable("a reply about files has two parts, and this one has one")
        return self._head.decode(head), rest


FILES = Endpoint(
    "unicron.files.*",
    Codec[FilesRequest](FilesRequest, "FilesRequest"),
    _FilesCodec(),
    by=("api",),
    to=("node",),
    timeout_s=4.0,
)
"""A reply takes milliseconds, with delays of 200 ms and losses on the way a second, and on a machine with every core
busy as long again. A node that takes longer is named in the api's answer."""


class ReadCode(Message):
    """Read a piece of the archive of a task's code, which the sender needs to start the task's processes."""

    node: Name
    task: Name
    digest: Digest
    offset: Offset


CODE = Endpoint(
    "unicron.code.*", ReadCode, FILES.reply, by=("node",), to=("api",), timeout_s=FILES.timeout_s, names_sender=True
)
"""A reply has ``CHUNK_BYTES``, or what is left. One of the apis answers."""


def successful(answer: FilesAnswer) -> FilesAnswer:
    """Return a reply unless it reports a failure.

    Raises:
        NotFound: the agent has no such file.
        Unavailable: the request failed there for another reason.
    """
    reply, _ = answer
    if reply.ok:
        return answer
    raise (NotFound if reply.code == NotFound.code else Unavailable)(reply.detail)
