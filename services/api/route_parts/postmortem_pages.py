"""How a post-mortem is answered: as JSON, as one HTML file, or as Markdown."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query, Response
from pydantic import BaseModel

from services.api.gateway import as_text
from services.api.postmortem import page
from services.api.postmortem.model import PostMortem, SlowWorkerPostMortem

Output = Annotated[
    Literal["json", "html", "md"], Query(alias="format", description="html: one file that needs no other")
]


def described(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the description of the answer, for FastAPI's ``responses``."""
    text = {"schema": {"type": "string"}}
    return {200: {"model": model, "content": {"text/html": text, "text/markdown": text}}}


def answer(made: PostMortem | SlowWorkerPostMortem, output: str) -> Response:
    """Return a post-mortem in the form that was asked for."""
    if output == "html":
        policy = {"Content-Security-Policy": page.content_security_policy()}
        return Response(page.html(made), media_type="text/html; charset=utf-8", headers=policy)
    if output == "md":
        return Response(page.markdown(made), media_type="text/markdown; charset=utf-8")
    return Response(as_text(made), media_type="application/json")
