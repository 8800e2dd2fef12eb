"""The demo's live view: tasks with steps, loss and WAF, workers, and incidents with how far each is handled."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.waiting import WaitingClient
from shared.errors import UnicronError

REFRESH_S = 0.5
"""Twice a second suffices for the eye, and is little work for the API."""


class View:
    """Prints what happens; on a terminal, with a table of the present state below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        self._console.print(f"{time.monotonic() - self._started:6.1f} s  {text}", highlight=False)

    async def follow(self, client: WaitingClient) -> None:
        """Show the state of the stack until cancelled; return at once where the output is no terminal."""
        if not self._console.is_terminal:
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                with suppress(UnicronError):
                    tasks, nodes = await client.items("/v1/tasks"), await client.items("/v1/nodes")
                    state = Group(_tasks(tasks), _nodes(nodes), _incidents(await client.incidents()))
                    live.update(state, refresh=True)
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
        times = {"restored": "restored_at", "over": "closed_at", "resumed": "resumed_at"}
        state = next((word for word, name in times.items() if i[name]), "being handled")
        text.append(f"{i['severity']} {i['kind']} on {i['worker'] or i['node']}: {state}\n", style="yellow")
    return text
