"""The health of a service or an agent, which it reports to anybody who asks."""

from __future__ import annotations

from pydantic import Field

from shared.bus.endpoints import NOTHING, Endpoint
from shared.bus.identities import SERVICES
from shared.bus.messages import Integer
from shared.model import Model

AGENT = "agent-"
"""The beginning of the name of a node's agent; the node follows."""


class Health(Model):
    """The reply to a health request.

    ``ready``: the service works. ``detail``: why it does not work. ``counters``: numbers by name. ``handled``: position
    of the log up to which the service has handled it; None: it follows no log. ``process``: who answers
    (``shared.machine.process_names``). ``active``: whether it does the service's work; False: it stands by. ``token``:
    that of its lease; 0: it has none.
    """

    name: str = ""
    pid: Integer = 0
    ready: bool = False
    detail: str = ""
    counters: dict[str, Integer] = Field(default_factory=dict)
    handled: Integer | None = None
    process: str = ""
    active: bool = True
    token: Integer = 0


HEALTH = Endpoint("unicron.health.*", NOTHING, Health, by=("api",), to=(*SERVICES, "node"), timeout_s=1.0)
"""The subject ends with the service's name, or with ``AGENT`` and a node's. All instances of a service answer. Each may
ask for its own health: a container's probe does. An answer takes milliseconds; container platforms give a probe about a
second by default."""
