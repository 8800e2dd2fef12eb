"""What a request to a receiver looks like: signed JSON, a message of Slack, an event of PagerDuty. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

from services.api.notices.notice import SEVERITIES, Notice
from services.api.notices.receivers import Receiver

_SUMMARY_CHARACTERS = 1024
"""Longest summary that PagerDuty takes (Events API v2, ``payload.summary``)."""


def request(receiver: Receiver, notice: Notice, at_s: int) -> tuple[dict[str, str], bytes]:
    """Return headers and body of an attempt to send a notice.

    Args:
        receiver: to whom.
        notice: what.
        at_s: when the attempt is made, in seconds since the epoch.
    """
    match receiver.shape:
        case "generic":
            body = _encoded(_generic(notice))
            return _signed(receiver.key, notice.id, body, at_s), body
        case "slack":
            body = _encoded(_slack(notice))
        case "pagerduty":
            body = _encoded(_pagerduty(receiver.key.decode(), notice))
    return {"content-type": "application/json"}, body


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _generic(notice: Notice) -> dict[str, Any]:
    about = {"key": notice.subject.key, "resolved": notice.resolved, "summary": notice.summary, "link": notice.link}
    return {"type": notice.type, "timestamp": notice.at.isoformat(), "data": {**notice.data, **about}}


def _signed(key: bytes, id: str, body: bytes, at_s: int) -> dict[str, str]:
    """Return the headers of Standard Webhooks (https://www.standardwebhooks.com), for which receivers have libraries.

    The signature is the base64 of the HMAC-SHA256 of ``<webhook-id>.<webhook-timestamp>.<body>``.
    """
    content = b".".join((id.encode(), str(at_s).encode(), body))
    signature = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{signature}",
    }


def _slack(notice: Notice) -> dict[str, Any]:
    """Return a message of an incoming webhook: https://api.slack.com/messaging/webhooks."""
    sign = ":white_check_mark: Resolved: " if notice.resolved else ":rotating_light: "
    lines = [f"{sign}{_escaped(notice.summary)}", *(f"• {_escaped(line)}" for line in notice.data.get("to_do", []))]
    return {"text": "\n".join([*lines, f"<{notice.link}|Post-mortem and state>"]), "unfurl_links": False}


def _escaped(text: str) -> str:
    """Return text in which Slack sees no link and no mention."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _pagerduty(routing_key: str, notice: Notice) -> dict[str, Any]:
    """Return an event of PagerDuty's Events API v2: https://developer.pagerduty.com/docs/send-alert-event."""
    about = {"routing_key": routing_key, "dedup_key": notice.subject.key}
    if notice.resolved:
        return {**about, "event_action": "resolve"}
    payload = {
        "summary": notice.summary[:_SUMMARY_CHARACTERS],
        "source": notice.subject.name or "control plane",
        "severity": SEVERITIES[notice.subject.topic],
        "timestamp": notice.at.isoformat(),
        "class": notice.type,
        "custom_details": dict(notice.data),
    }
    links = [{"href": notice.link, "text": "Post-mortem and state"}]
    return {**about, "event_action": "trigger", "payload": payload, "links": links, "client": "Unicron"}
