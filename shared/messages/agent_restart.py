"""The request to a node's agent to leave its processes to a successor: core NATS between api and agent.

The agent answers, and ends. Its supervisor starts the next one, of the program that is installed by then.
"""

from __future__ import annotations

from pydantic import TypeAdapter

from shared.bus.messages import Message, MessageId

AGENT_RESTART = "unicron.agent-restart"
"""Prefix of the subjects of requests; the node follows (request and reply)."""


class AgentRestart(Message):
    """Hand over. ``incarnation``: of the agent that is meant; another one answers, and stays."""

    incarnation: MessageId


class AgentRestartResult(Message):
    """The answer. ``incarnation``: of the agent that answers; it ends if it is the one that was meant."""

    incarnation: MessageId


AGENT_RESTART_REQUEST: TypeAdapter[AgentRestart] = TypeAdapter(AgentRestart)
AGENT_RESTART_RESULT: TypeAdapter[AgentRestartResult] = TypeAdapter(AgentRestartResult)
