"""The request to a node's agent to leave its processes to a successor: core NATS between api and agent.

The agent answers, and ends. Its supervisor starts the next one, of the program that is installed by then.
"""

from __future__ import annotations

from shared.bus.endpoints import Endpoint
from shared.bus.messages import Message, MessageId


class AgentRestart(Message):
    """Hand over. ``incarnation``: that of the agent that is meant; another agent answers, and stays."""

    incarnation: MessageId


class AgentRestartResult(Message):
    """The answer. ``incarnation``: that of the agent that answers, which ends if it is the one that was meant."""

    incarnation: MessageId


AGENT_RESTART = Endpoint(
    "unicron.agent-restart.*", AgentRestart, AgentRestartResult, by=("api",), to=("node",), timeout_s=3.0
)
"""An answer takes milliseconds; a busy machine has a hundred times that."""
