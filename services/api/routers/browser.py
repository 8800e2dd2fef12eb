"""Sessions of browsers (``unicron open``): the link that begins one, their end, and who sends a request."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, status
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from services.api.access.access import LINKS, Who
from services.api.access.browser_sessions import SESSION_S, cookie_name
from services.api.gateway import Api
from services.api.http.methods import HEAD_ONLY
from services.api.route_parts.parameters import NAMED, PROBLEMS, problems
from shared.errors import Forbidden
from shared.interface.models import BrowserLink, EndedSessions
from shared.service.tokens import Scope

router = APIRouter(tags=["browser"])

_OPENED = problems(404, 421, 422, 429, 503)

# Not a redirect: the browser would follow it as part of the visit that began elsewhere, in a mail or a chat, and would
# leave out a cookie that is SameSite=Strict. From this page on it is a visit within this site.
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url=/">
<title>Unicron</title>
<p><a href="/">Unicron</a></p>
</html>
"""


@router.post("/v1/browser-links", status_code=status.HTTP_201_CREATED, responses=PROBLEMS)
async def link(api: Api, who: Who) -> BrowserLink:
    """Make a link that begins a browser's session with your rights. It can be opened once, within two minutes."""
    if who.in_session:
        raise Forbidden("a browser's session makes no links to others: it would never end")
    code, expires_at = api.sessions.link(who.bearer)
    return BrowserLink(path=f"{LINKS}{code}", expires_at=expires_at)


@router.get(f"{LINKS}{{code}}", response_class=HTMLResponse, responses=NAMED | _OPENED)
async def open_link(
    request: Request,
    api: Api,
    code: Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="the secret part of the link")],
) -> HTMLResponse:
    """Begin a session: set its cookie, and lead to `/`. `HEAD` uses nothing up."""
    response = HTMLResponse(_PAGE, headers={"Cache-Control": "no-store"})
    if getattr(request.state, HEAD_ONLY, False):
        api.sessions.check(code)
        return response
    response.set_cookie(
        cookie_name(request.scope),
        await api.sessions.open(code),
        max_age=int(SESSION_S),
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return response


@router.delete("/v1/browser-sessions", responses=PROBLEMS)
async def end(
    api: Api,
    who: Who,
    everybody: Annotated[bool, Query(description="those of all, which needs the scope `operate`")] = False,
) -> EndedSessions:
    """End your browsers' sessions, and links that nobody has opened yet."""
    if everybody:
        who.require(Scope.OPERATE)
    return EndedSessions(ended=await api.sessions.end(None if everybody else who.name))


class ActorShown(BaseModel):
    """Who sends a request. ``name``: as the log and the owners of tasks have it; ``scope``: what they may do."""

    name: str
    scope: Scope


@router.get("/v1/actor", responses=PROBLEMS)
async def actor(who: Who) -> ActorShown:
    """Show who you are to the server, and what you may do."""
    return ActorShown(name=who.name, scope=who.scope)
