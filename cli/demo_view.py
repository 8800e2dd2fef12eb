"""The demo's live view: workers, tasks, steps, loss, WAF, incidents, and what is being done to them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

REFRESH_S = 0.5
"""Twice a second is enough for the eye and costs the API nothing to speak of."""


class View:
    """Prints what happens; on a terminal, a table of the present state stays below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        self._console.print(f"{time.monotonic() - self._started:6.1f} s  {text}", highlight=False)

    async def follow(self, url: str) -> None:
        """Show the state of the stack at ``url`` until cancelled; nothing where the output is no terminal."""
        if not self._console.is_terminal:
            return
        async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                while True:
                    with suppress(httpx.HTTPError):
                        answers = [
                            (await client.get(p)).json()["items"] for p in ("/v1/tasks", "/v1/nodes", "/v1/incidents")
                        ]
                        live.update(Group(_tasks(answers[0]), _nodes(answers[1]), _incidents(answers[2])), refresh=True)
                    await asyncio.sleep(REFRESH_S)


def _tasks(tasks: list[dict[str, Any]]) -> Table:
    table = Table(title="tasks", title_justify="left")
    for name in ("task", "state", "step", "workers", "generation", "loss", "GFLOP/s", "WAF"):
        table.add_column(name)
    for t in tasks:
        table.add_row(
            t["name"],
            t["state"],
            f"{t['step']}/{t['steps']}",
            str(t["workers"]),
            str(t["generation"]),
            "-" if t["loss"] is None else f"{t['loss']:.4f}",
            f"{(t['throughput_flop_per_s'] or 0) / 1e9:.2f}",
            f"{(t['waf_flop_per_s'] or 0) / 1e9:.2f}",
        )
    return table


def _nodes(nodes: list[dict[str, Any]]) -> Text:
    text = Text()
    for node in nodes:
        cells = " ".join(
            f"[{w['task'] or '-'}{'' if w['rank'] is None else ':' + str(w['rank'])}]" for w in node["workers"]
        )
        text.append(f"{node['name']} {node['state']:9s} {cells}\n", style="" if node["state"] == "ready" else "red")
    return text


def _incidents(incidents: list[dict[str, Any]]) -> Text:
    text = Text()
    for i in incidents:
        state = "restored" if i["restored_at"] else "resumed" if i["resumed_at"] else "being handled"
        text.append(f"{i['severity']} {i['kind']} on {i['worker'] or i['node']}: {state}\n", style="yellow")
    return text
