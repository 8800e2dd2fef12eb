"""The code that comes along with tasks, as the api has it: who may use it, which nodes get it, when it is removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from services.api.access.access import Actor
from services.api.store.readers import ViewReader
from services.api.store.tables import DELETED, TASKS
from services.api.submission.code_store import CodeStore, Kept
from shared.bus.connection import Bus
from shared.errors import Busy, Conflict, Forbidden, NotFound, Unavailable, UnicronError
from shared.messages.node_files import CODE, FilesAnswer, FilesReply, ReadCode, failed
from shared.service.tokens import Scope
from shared.tasks.code import Code
from shared.tasks.code_archive import code_of
from shared.tasks.specification import refused
from shared.views.documents import TaskView

logger = logging.getLogger(__name__)

MOST_SENT_BYTES = 1 << 30
"""Most bytes of code of one actor that are kept: hundreds of versions of a repository, and no full disk."""

MOST_AT_ONCE = 4
"""Archives that are taken in at the same time: each is in memory."""

KEPT_UNUSED_S = 3600.0
"""How long code is kept that no task names: from when it was sent to when it is submitted takes seconds."""

REMOVE_S = 600.0
"""Pause between two looks at which code no task names any more."""


class ShippedCode:
    """The code of all tasks.

    Args:
        store: keeps it.
        read: returns what a function finds in the projections.
    """

    def __init__(self, store: CodeStore, read: Callable[[Callable[[ViewReader], Any]], Awaitable[Any]]) -> None:
        self.store, self._read_views = store, read
        self._taking = 0

    async def take(self, digest: str, body: Callable[[], Awaitable[bytes]], actor: Actor) -> tuple[Code, bool]:
        """Keep an archive that an actor sends; return what it is, and whether it is new.

        Args:
            digest: which it is to have.
            body: reads it.
            actor: who sends it.

        Raises:
            InvalidInput: it is no archive of code, or has another digest.
            Conflict: the actor has sent as much as is kept.
            Busy: others send theirs.
        """
        if self._taking >= MOST_AT_ONCE:
            raise Busy(f"{MOST_AT_ONCE} archives of code are taken in at this moment; try again")
        self._taking += 1
        try:
            archive = await body()
            return await asyncio.to_thread(self._put, digest, archive, actor.name)
        finally:
            self._taking -= 1

    def _put(self, digest: str, archive: bytes, actor: str) -> tuple[Code, bool]:
        code = code_of(archive)
        if code.digest != digest:
            raise refused([("digest", digest, f"is not that of the archive, which has {code.digest}")])
        kept = self.store.kept(digest)
        new_of_actor = kept is None or actor not in kept.senders
        if new_of_actor and self.store.sent_bytes(actor) + code.size_bytes > MOST_SENT_BYTES:
            raise Conflict(
                f"{actor} has sent {MOST_SENT_BYTES} bytes of code, the most that is kept: delete tasks that name some"
            )
        return code, self.store.put(code, archive, actor)

    def readable(self, digest: str, actor: Actor) -> Kept:
        """Return what is kept, if an actor may read it. Blocks.

        Raises:
            NotFound: nothing is kept under the digest.
            Forbidden: the actor has not sent it, and may not operate.
        """
        kept = self.store.kept(digest)
        if kept is None:
            raise NotFound(f"no code {digest} is kept here")
        if actor.name not in kept.senders and not actor.scope.includes(Scope.OPERATE):
            raise Forbidden(f"code {digest} is for those who have sent it, and for the scope 'operate'")
        return kept

    def name(self, code: Code, actor: Actor) -> None:
        """Check that an actor may submit a task with this code, which is kept from here on. Blocks.

        Raises:
            InvalidInput: it is not kept here, or is not what the specification says.
            Forbidden: it is somebody else's.
        """
        try:
            kept = self.readable(code.digest, actor)
        except NotFound as err:
            raise refused(
                [("code.digest", code.digest, f"{err.detail}: send it with --ship, which submits anew")]
            ) from err
        if kept.code != code:
            raise refused([("code", str(code), f"is {kept.code}")])
        self.store.use(code.digest)

    async def serve(self, bus: Bus) -> None:
        """Begin to answer nodes."""
        await bus.serve(CODE, self._answer, refuse=failed, group="api")

    async def _answer(self, request: ReadCode) -> FilesAnswer:
        try:
            task = await self._read_views(lambda views: views.get(TASKS, request.task))
            _check_node(task, request)
            data = await asyncio.to_thread(self.store.piece, request.digest, request.offset)
            if data is None:
                raise NotFound(f"the api has no code {request.digest}, or no byte {request.offset} of it")
            return FilesReply(offset=request.offset), data
        except UnicronError as err:
            return failed(err)

    async def keep_removing(self) -> None:
        """Remove what no task names that is not deleted, until cancelled."""
        while True:
            await asyncio.sleep(REMOVE_S)
            try:
                await self.remove_unnamed()
            except Exception as err:  # what goes wrong here must not end the api
                logger.warning("code of tasks is not removed: %s %s; again", type(err).__name__, err)

    async def remove_unnamed(self) -> None:
        """Remove what no task names that is not deleted, and nobody has sent or submitted of late.

        Raises:
            Unavailable: a database does not answer.
        """
        unused = await asyncio.to_thread(self.store.unused, KEPT_UNUSED_S)
        if unused and (unnamed := unused - await self._read_views(_named)):
            await asyncio.to_thread(self.store.remove, unnamed, KEPT_UNUSED_S)
            logger.info("removed the code of %d archives that no task names", len(unnamed))

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.to_thread(self.store.close)


def _named(views: ViewReader) -> set[str]:
    """Return the digests of the code that tasks name."""
    rows = views.rows(TASKS, "document", without=DELETED)
    specs = (TaskView.model_validate_json(row.document).spec for row in rows if '"code":' in row.document)
    return {spec.code.digest for spec in specs if spec.code is not None}


def _check_node(task: TaskView | None, request: ReadCode) -> None:
    """Check that a node may have a task's code: it is to start processes of the task.

    Raises:
        Unavailable: no plan that is known here has the task on the node; one may be, a moment later.
    """
    if task is None or task.deleted_at is not None or task.spec.code is None:
        raise Unavailable(f"no task {request.task!r} with code is known here yet")
    if task.spec.code.digest != request.digest:
        raise Unavailable(f"task {request.task!r} is not known here yet to have the code {request.digest}")
    if not any(worker.startswith(f"{request.node}/") for worker in task.planned):
        raise Unavailable(f"no plan has task {request.task!r} on node {request.node}")
