"""Notices to a webhook: one request when an incident opens, opens again and is over, and one when a task has failed.

And one when a task whose steps are all done cannot write its result, and waits until somebody makes room.

The log is the queue. The notices follow it behind the projections, one request at a time, and what is sent is derived
from both: a receiver that is away for days costs no memory here. ``<run_dir>/webhook.json`` has the position up to
which all was sent, and the incidents whose end is still to be said. The file is written after each request, so that
after a crash one request at most is sent twice, under the same id. Nothing waits for a notice.
"""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import Field, ValidationError

from services.api.gateway import Gateway
from services.api.notices.webhook import Delivery, Webhook, WebhookMetrics, read_secret
from services.api.store.accounts import Accounts
from services.api.store.readers import ViewReader
from services.api.store.tables import INCIDENTS, TASKS
from shared.costs.report import incident_cost
from shared.errors import InvalidInput, Unavailable
from shared.events.base import derived_id
from shared.events.union import ErrorDetected, Recorded, TaskCheckpointFailed, TaskFailed
from shared.machine.durable_files import replace_file
from shared.model import Model, utc_now
from shared.service.log_lines import concerning
from shared.settings.model import Settings
from shared.views.documents import IncidentView

logger = logging.getLogger(__name__)

Kind = Literal["incident.opened", "incident.reopened", "incident.closed", "task.failed", "task.waiting"]

_WAIT_S = 3600.0
"""Longest wait for a record; then the wait begins anew."""

_PAUSE_S = 0.5
"""Pause between two looks, and after an error: records come in bursts, and nobody waits for a notice."""

_READ = 100
"""Records read at once."""

_TYPES = ["error.detected", "task.failed", "task.checkpoint-failed"]
"""The types of events of which somebody is told."""

_MODE = 0o600


class Sent(Model):
    """What was sent. ``position``: up to which all incidents were announced; ``open``: those whose end is not yet."""

    position: int
    open: list[str] = Field(default_factory=list)


class IncidentNotices:
    """Sends the notices of one api.

    Args:
        settings: ``webhook_url``, ``webhook_secret_file``, ``server``, ``run_dir``.
        metrics: of the webhook.

    Raises:
        InvalidInput: the secret is missing or cannot be used.
    """

    def __init__(self, settings: Settings, metrics: WebhookMetrics) -> None:
        self._server, self._path = settings.server.rstrip("/"), settings.run_dir / "webhook.json"
        self._webhook: Webhook | None = None
        if settings.webhook_url:
            if settings.webhook_secret_file is None:
                problem = "is needed with webhook_url: a file with whsec_ and the base64 of a key"
                errors = [{"field": "webhook_secret_file", "value": None, "problem": problem}]
                raise InvalidInput(f"settings refused: webhook_secret_file {problem}", errors)
            self._webhook = Webhook(settings.webhook_url, read_secret(settings.webhook_secret_file), metrics)

    async def keep_sending(self, api: Gateway) -> None:
        """Send what is due, until cancelled; return at once where there is no webhook."""
        if self._webhook is None:
            return
        sent: Sent | None = None
        trouble = ""
        while True:
            try:
                sent = sent or await self._begin(api)
                until = api.feed.position
                sent = await self._send(api, self._webhook, sent, until)
                trouble = ""
                await api.feed.wait_beyond(until, timeout_s=_WAIT_S)
            except Exception as err:  # what goes wrong here must not end the api
                sent = None  # begin where the file is
                if str(err) != trouble:
                    logger.warning("webhook: %s %s; again", type(err).__name__, err)
                trouble = str(err)
            await asyncio.sleep(_PAUSE_S)

    async def _begin(self, api: Gateway) -> Sent:
        """Return what was sent before this start. A new webhook gets what comes from now on."""
        found = await asyncio.to_thread(_read, self._path)
        if found is None or found.position > api.feed.position:
            found = Sent(position=api.feed.position)
            await self._save(found)
        return found

    async def _save(self, sent: Sent) -> None:
        await asyncio.to_thread(replace_file, self._path, sent.model_dump_json().encode(), mode=_MODE)

    async def _send(self, api: Gateway, webhook: Webhook, sent: Sent, until: int) -> Sent:
        """Send what was not sent up to a position that the projections have; return what was sent then."""
        while records := await api.journal.read(after=sent.position, limit=_READ, types=_TYPES):
            for record in records:
                if record.position > until:
                    return await self._close(api, webhook, sent)
                if isinstance(record.event, TaskFailed | TaskCheckpointFailed):
                    await self._of_task(api, webhook, record.position, record.event)
                    sent = Sent(position=record.position, open=sent.open)
                    await self._save(sent)
                else:
                    sent = await self._open(api, webhook, sent, record)
        return await self._close(api, webhook, sent)

    async def _open(self, api: Gateway, webhook: Webhook, sent: Sent, record: Recorded) -> Sent:
        """Send that an incident has opened, or is open again, if it is with this error; return what was sent then."""
        assert isinstance(record.event, ErrorDetected)
        name, still_open = record.event.incident, sent.open
        view = await _incident(api, name)
        if view is not None and view.position == record.position:
            await self._deliver(api, webhook, name, "incident.opened")
            still_open = [*still_open, name]
        elif view is not None and name not in still_open and record.event.repeats is not None:
            await self._deliver(api, webhook, name, "incident.reopened", record.event.event_id)
            still_open = [*still_open, name]
        sent = Sent(position=record.position, open=still_open)
        await self._save(sent)
        return sent

    async def _close(self, api: Gateway, webhook: Webhook, sent: Sent) -> Sent:
        """Send the ends of incidents that are over; return what was sent then."""
        for name in sent.open:
            view = await _incident(api, name)
            if view is not None and view.closed_at is not None:
                # The end of an incident that was open again is another one: receivers drop what they have.
                again = f"after attempt {len(view.attempts)}" if len(view.attempts) > 1 else ""
                await self._deliver(api, webhook, name, "incident.closed", again)
                sent = Sent(position=sent.position, open=[one for one in sent.open if one != name])
                await self._save(sent)
        return sent

    async def _of_task(
        self, api: Gateway, webhook: Webhook, position: int, event: TaskFailed | TaskCheckpointFailed
    ) -> None:
        """Send that a task has failed, and why: of an incident, or refused before it has trained; or that it waits.

        A checkpoint that cannot be written in the midst of training is no notice: a later one is written by itself.
        """
        failed = isinstance(event, TaskFailed)
        if not failed:
            view = await api.read(lambda views: views.get(TASKS, event.task))
            if view is None or event.step < view.spec.steps:
                return
        data = {
            "task": event.task,
            "reason": event.reason,
            "step": event.step,
            "incident": (event.incident or None) if isinstance(event, TaskFailed) else None,
            "position": position,
            "occurred_at": event.occurred_at.isoformat(),
            "link": f"{self._server}/v1/tasks/{quote(event.task, safe='')}",
        }
        with concerning({"task": event.task}):
            kind: Kind = "task.failed" if failed else "task.waiting"
            await webhook.deliver(delivery(kind, event.event_id, data, utc_now()))

    async def _deliver(self, api: Gateway, webhook: Webhook, incident: str, kind: Kind, again: str = "") -> None:
        now = utc_now()

        def read(views: ViewReader) -> dict[str, Any]:
            cluster = api.cluster(views)
            amounts = Accounts(views, now).incidents([incident]).get(incident)
            cost = incident_cost(amounts, cluster.price_per_worker_hour).model_dump()
            facts = facts_of(views.find(INCIDENTS, incident))
            return {**facts, "cost": {**cost, "currency": cluster.currency}}

        data = {**await api.read(read), "link": f"{self._server}/v1/incidents/{quote(incident, safe='')}"}
        with concerning({"incident": incident}):
            await webhook.deliver(delivery(kind, incident, data, now, again))


async def _incident(api: Gateway, name: str) -> IncidentView | None:
    return await api.read(lambda views: views.get(INCIDENTS, name))


def delivery(kind: Kind, about: str, data: dict[str, Any], now: datetime, again: str = "") -> Delivery:
    """Return what is sent.

    Args:
        kind: of the notice.
        about: id of the incident, or of the event.
        data: about it, as JSON has it.
        now: the present.
        again: what tells a further notice of the kind about the same from the earlier ones; empty: it is the first.
    """
    body = json.dumps({"type": kind, "timestamp": now.isoformat(), "data": data}).encode()
    return Delivery(derived_id(about, "webhook", f"{kind} {again}".rstrip()), body, about)


def facts_of(view: IncidentView) -> dict[str, Any]:
    """Return what a notice says of an incident besides its cost. ``cause``: the kind of the error."""
    names = {"id", "position", "severity", "task", "tasks", "node", "worker", "plans"}
    names |= {"occurred_at", "detected_at", "restored_at", "closed_at", "failed_tasks"}
    facts = view.model_dump(mode="json", include=names)
    return {"incident": facts.pop("id"), "cause": view.kind.value, **facts}


def _read(path: Path) -> Sent | None:
    """Return what a file says that was sent; None: there is none.

    Raises:
        Unavailable: it cannot be read.
    """
    try:
        return Sent.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as err:
        raise Unavailable(f"{path} cannot be read ({err}); without it, notices begin anew") from err
