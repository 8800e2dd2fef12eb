"""What a shell proposes for the names and ids that verbs take: it is asked of the server.

A proposal that takes long is none, and a shell has no place for an error: without an answer there is no proposal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

LIMIT_S = 1.0
"""Longest wait for a connection, and for the answer. A person who presses Tab waits no longer."""

_MOST = 200
"""Newest items that are proposed from; a shell asks before it shows more."""

Proposals = list[tuple[str, str]]
"""Value and what is said of it."""


def task_names(ctx: typer.Context, incomplete: str) -> Proposals:
    """Return tasks, with their states."""
    return _proposals(ctx, "/v1/tasks", incomplete, lambda task: (task["name"], task["state"]))


def node_names(ctx: typer.Context, incomplete: str) -> Proposals:
    """Return nodes, with their states."""
    return _proposals(ctx, "/v1/nodes", incomplete, lambda node: (node["name"], node["state"]))


def task_or_node_names(ctx: typer.Context, incomplete: str) -> Proposals:
    """Return tasks, and behind them nodes."""
    return [*task_names(ctx, incomplete), *node_names(ctx, incomplete)]


def incident_ids(ctx: typer.Context, incomplete: str) -> Proposals:
    """Return incidents, the newest first, with their kind and where they were."""

    def proposal(incident: dict[str, Any]) -> tuple[str, str]:
        place = incident["task"] or incident["node"] or ""
        return incident["id"], f"{incident['kind']} {place} {incident['detected_at'][:19]}"

    return _proposals(ctx, "/v1/incidents", incomplete, proposal)


def fault_ids(ctx: typer.Context, incomplete: str) -> Proposals:
    """Return incidents, and behind them slow workers, the newest first."""

    def proposal(slow: dict[str, Any]) -> tuple[str, str]:
        return slow["id"], f"{slow['worker']} {slow['worst']:.3g}x slower {slow['found_at'][:19]}"

    return [*incident_ids(ctx, incomplete), *_proposals(ctx, "/v1/slow-workers", incomplete, proposal)]


def plan_ids(ctx: typer.Context, incomplete: str) -> Proposals:
    """Return plans, the newest first, with their trigger and when they were decided."""

    def proposal(plan: dict[str, Any]) -> tuple[str, str]:
        return plan["id"], f"{plan['trigger']} {plan['decided_at'][:19]}"

    return _proposals(ctx, "/v1/plans", incomplete, proposal)


def _proposals(
    ctx: typer.Context, path: str, incomplete: str, proposal: Callable[[dict[str, Any]], tuple[str, str]]
) -> Proposals:
    """Return the proposals from a list of the server that begin with what was typed."""
    try:
        from unicron_client.resources import Client

        with Client(ctx.params.get("server"), timeout_s=LIMIT_S) as client:
            order = {} if path == "/v1/nodes" else {"order": "newest"}
            items = client.get(path, {"limit": _MOST, **order})["items"]
        return [found for item in items if (found := proposal(item))[0].startswith(incomplete)]
    except Exception:  # whatever it is, the shell shows its user's line again
        return []
