"""Notices of a cloud about this machine, by its metadata service. The parsers are pure.

The paths and fields are those that the providers document:

- AWS: ``spot/instance-action``, ``events/recommendations/rebalance`` and ``events/maintenance/scheduled`` below
  ``/latest/meta-data``, with a token of IMDSv2.
- Google: ``instance/preempted`` and ``instance/maintenance-event`` below ``/computeMetadata/v1``.
- Azure: ``/metadata/scheduledevents``, which tells of all machines of a set; ``instance/compute/name`` is this one's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx

from cli.watch.provider import Provider
from cli.watch.trouble import Trouble, key_of
from shared.errors import Unavailable

TIMEOUT_S = 5.0
"""Time for an answer of the metadata service, which is on the machine's own host."""

PREEMPTED_S = 30.0
"""Time from Google's notice of a preemption to the machine's end."""

MAINTENANCE_S = 60.0
"""Time from ``maintenance-event`` to the machine's end."""

ADDRESSES = {
    Provider.AWS: "http://169.254.169.254",
    Provider.GOOGLE: "http://metadata.google.internal",
    Provider.AZURE: "http://169.254.169.254",
}

Answers = Mapping[str, str]
"""What was asked, by the last part of its path -> the text of the answer; nothing where the answer was 404."""


def of_aws(node: str, answers: Answers, now: datetime) -> list[Trouble]:
    """Return what AWS has announced."""
    found = []
    if text := answers.get("instance-action"):
        action = json.loads(text)
        reason = f"the spot instance is to {action['action']} at {action['time']}"
        found.append(Trouble(node, "cloud.spot", "warning", reason, action, _time(action["time"])))
    if text := answers.get("rebalance"):
        reason = "AWS recommends another instance: this one is likely to be interrupted"
        found.append(Trouble(node, "cloud.rebalance", "warning", reason, json.loads(text)))
    for event in json.loads(answers.get("scheduled") or "[]"):
        if event.get("State", "active") == "active":
            reason = f"{event['Code']} at {event['NotBefore']}: {event.get('Description', '')}"
            key = key_of("cloud", event["Code"])
            found.append(Trouble(node, key, "warning", reason, event, _time(event["NotBefore"])))
    return found


def of_google(node: str, answers: Answers, now: datetime) -> list[Trouble]:
    """Return what Google has announced. A live migration leaves the machine where it is, for those who see it."""
    found = []
    if answers.get("preempted", "").strip() == "TRUE":
        ends_at = now + timedelta(seconds=PREEMPTED_S)
        found.append(Trouble(node, "cloud.preempted", "warning", "is preempted", {"preempted": "TRUE"}, ends_at))
    event = answers.get("maintenance-event", "").strip()
    if event == "TERMINATE_ON_HOST_MAINTENANCE":
        ends_at = now + timedelta(seconds=MAINTENANCE_S)
        found.append(
            Trouble(node, "cloud.maintenance", "warning", "its host is to be maintained", {"event": event}, ends_at)
        )
    return found


def of_azure(node: str, answers: Answers, now: datetime) -> list[Trouble]:
    """Return what Azure has announced of this machine. A freeze is a pause of seconds, and is left out."""
    found = []
    own = answers.get("name", "").strip().lower()
    for event in json.loads(answers.get("scheduledevents") or "{}").get("Events", []):
        mine = own in [str(name).lower() for name in event.get("Resources", [])]
        if mine and event["EventType"] != "Freeze":
            not_before = event.get("NotBefore") or ""
            reason = (
                f"{event['EventType']} {f'at {not_before}' if not_before else 'now'}: {event.get('Description', '')}"
            )
            ends_at = _time(not_before) if not_before else now
            key = key_of("cloud", event["EventType"])
            found.append(Trouble(node, key, "warning", reason, event, ends_at))
    return found


_PARSERS: dict[Provider, Callable[[str, Answers, datetime], list[Trouble]]] = {
    Provider.AWS: of_aws,
    Provider.GOOGLE: of_google,
    Provider.AZURE: of_azure,
}

_PATHS: dict[Provider, tuple[str, ...]] = {
    Provider.AWS: (
        "/latest/meta-data/spot/instance-action",
        "/latest/meta-data/events/recommendations/rebalance",
        "/latest/meta-data/events/maintenance/scheduled",
    ),
    Provider.GOOGLE: (
        "/computeMetadata/v1/instance/preempted",
        "/computeMetadata/v1/instance/maintenance-event",
    ),
    Provider.AZURE: (
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        "/metadata/scheduledevents?api-version=2020-07-01",
    ),
}


class Notices:
    """The notices about this machine.

    Args:
        provider: who runs the machine.
        node: its name.
        ahead_s: notices of what happens later than in so many seconds wait.
        address: of the metadata service; None: the provider's.
    """

    def __init__(self, provider: Provider, node: str, ahead_s: float, address: str | None = None) -> None:
        self._provider, self._node, self._ahead_s = provider, node, ahead_s
        self._address = address or ADDRESSES[provider]

    def look(self) -> list[Trouble]:
        """Ask the metadata service.

        Raises:
            Unavailable: it does not answer, or not as is documented.
        """
        now = datetime.now(UTC)
        try:
            found = _PARSERS[self._provider](self._node, self._answers(), now)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as err:
            what = f"{type(err).__name__}: {err}"
            raise Unavailable(f"the metadata service of {self._provider.value} ({self._address}): {what}") from err
        latest = now + timedelta(seconds=self._ahead_s)
        return [trouble for trouble in found if trouble.deadline_at is None or trouble.deadline_at <= latest]

    def _answers(self) -> Answers:
        found: dict[str, str] = {}
        with httpx.Client(base_url=self._address, timeout=TIMEOUT_S, trust_env=False) as http:
            headers = self._headers(http)
            for path in _PATHS[self._provider]:
                answer = http.get(path, headers=headers)
                if answer.status_code != httpx.codes.NOT_FOUND:
                    found[path.partition("?")[0].rpartition("/")[2]] = answer.raise_for_status().text
        return found

    def _headers(self, http: httpx.Client) -> dict[str, str]:
        if self._provider is Provider.GOOGLE:
            return {"Metadata-Flavor": "Google"}
        if self._provider is Provider.AZURE:
            return {"Metadata": "true"}
        wish = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token = http.put("/latest/api/token", headers=wish).raise_for_status().text
        return {"X-aws-ec2-metadata-token": token}


def _time(text: str) -> datetime:
    """Return a time of ISO 8601 or of HTTP; one without a zone is in UTC.

    Raises:
        ValueError: it is neither.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = parsedate_to_datetime(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
