"""What the system has recorded since a test began, as the API shows it. The session's tests share one log."""

from __future__ import annotations

from tests.e2e.kit import Client, Record


class Recorded:
    """Incidents and events since this was made, of all tasks and nodes, oldest first.

    Args:
        client: of the API.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._incidents = {incident["id"] for incident in client.items("/v1/incidents")}
        self._events = len(client.items("/v1/events"))

    def incidents(self) -> list[Record]:
        """Return the incidents."""
        return [i for i in self._client.items("/v1/incidents") if i["id"] not in self._incidents]

    def restored(self) -> Record:
        """Wait until there is an incident that is over; return the first one."""
        found = self._client.until("an incident is over", lambda: [i for i in self.incidents() if i["restored_at"]])
        incident: Record = found[0]
        return incident

    def events(self, *types: str, task: str | None = None) -> list[Record]:
        """Return the events of some types, of one task if it is given."""
        events = [r["event"] for r in self._client.items("/v1/events")[self._events :] if r["type"] in types]
        return [event for event in events if task is None or event.get("task") == task]
