"""The client that the verbs use: that of ``unicron_client``, under the names that they import."""

from __future__ import annotations

from unicron_client.resources import Client
from unicron_client.transport import PAGE_ITEMS, TIMEOUT_S, Params, problem_error, raise_problem, transport_errors

__all__ = [
    "PAGE_ITEMS",
    "TIMEOUT_S",
    "Client",
    "Params",
    "problem_error",
    "raise_problem",
    "transport_errors",
]
