"""Conditional requests: entity tags, ``If-None-Match`` on reads and ``If-Match`` on changes (RFC 9110, section 13).

The tag of a task has two parts, ``"<revision>.<digest>"``. The digest is that of the whole answer, which the heartbeats
change all the time, and counts for reads. The revision is that of what users ask of the task and of its end, and counts
for changes: steps that a task has done since it was read are no reason to refuse one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Annotated

from fastapi import Header, Response
from starlette.status import HTTP_304_NOT_MODIFIED

from shared.errors import PreconditionFailed
from shared.views.documents import TaskView

_DIGEST_CHARACTERS = 16
"""The part of a SHA-256, in hexadecimal, that is a tag: 64 bits tell the states of one resource apart."""

_REVISION = re.compile(rf'"(\d{{1,18}})\.[0-9a-f]{{{_DIGEST_CHARACTERS}}}"')
"""A tag of a task. A revision of more digits is none: what a client sends is not read as a number of any size."""

_MOST_CHARACTERS = 1000
"""The longest header with tags: some dozens of them."""

IfNoneMatch = Annotated[
    str, Header(alias="If-None-Match", max_length=_MOST_CHARACTERS, description="ETag of an earlier answer: else 304")
]
IfMatch = Annotated[
    str, Header(alias="If-Match", max_length=_MOST_CHARACTERS, description="ETag of the task as it was read: else 412")
]


def etag(text: str, revision: int | None = None) -> str:
    """Return the tag of an answer.

    Args:
        text: the answer's JSON.
        revision: of the task that it shows; None: it shows something else.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f'"{digest}"' if revision is None else f'"{revision}.{digest}"'


def answer(text: str, if_none_match: str, revision: int | None = None) -> Response:
    """Return JSON with its tag; only the tag (304), if the client has this answer already."""
    tag = etag(text, revision)
    known = [one.removeprefix("W/") for one in _tags(if_none_match)]
    if tag in known or "*" in known:
        return Response(status_code=HTTP_304_NOT_MODIFIED, headers={"ETag": tag})
    return Response(text, media_type="application/json", headers={"ETag": tag})


def check_revision(if_match: str, view: TaskView, present_tag: Callable[[], str]) -> None:
    """Refuse a change of a task that is not as the client has read it.

    Args:
        if_match: the header; empty: the client does not say.
        view: the task.
        present_tag: returns the task's present tag.

    Raises:
        PreconditionFailed: somebody has asked something of the task since, or it has ended.
    """
    tags = _tags(if_match)
    if not tags or "*" in tags:
        return
    revisions = [int(found[1]) for one in tags if (found := _REVISION.fullmatch(one))]
    if view.revision not in revisions:
        tag = present_tag()
        raise PreconditionFailed(f"task {view.name!r} has changed since it was read; its ETag is now {tag}", etag=tag)


def _tags(header: str) -> list[str]:
    return [one.strip() for one in header.split(",") if one.strip()]
