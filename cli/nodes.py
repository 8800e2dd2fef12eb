"""``unicron nodes``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.options import Format, Output, Server
from cli.output import clock, print_json, print_table

Detector = Annotated[bool, typer.Option("--detector", help="The limits by which the detector judges them now.")]


def nodes(server: Server = None, detector: Detector = False, output: Output = Format.TEXT) -> None:
    """List nodes and their workers."""
    from cli.client import Client

    with Client(server) as client:
        if detector:
            _show_limits(client.pages("/v1/limits"), output)
            return
        page = client.pages("/v1/nodes")
    if output is Format.JSON:
        print_json(page)
        return
    rows = []
    for node in page["items"]:
        heartbeat = clock(node["last_heartbeat_at"])
        for worker in node["workers"]:
            rank = None if worker["rank"] is None else f"rank {worker['rank']}"
            does = (
                worker["state"] if worker["slowdown"] == 1.0 else f"{worker['state']}, {worker['slowdown']:.3g}x slow"
            )
            rows.append((node["name"], node["state"], worker["worker"], does, worker["task"], rank, heartbeat))
    columns = ("NODE", "STATE", "WORKER", "DOES", "TASK", "RANK", "LAST HEARTBEAT")
    print_table(columns, rows, empty="no nodes", least=("LAST HEARTBEAT", "RANK"), wide=output is Format.WIDE)
    for node in page["items"]:
        if node["reason"]:
            print(f"{node['name']} is {node['state']}: {node['reason']}")
        for device in node.get("devices", []):
            faults = [f"{fault} {count} times" for fault, count in device["faults"].items()]
            print(f"{node['name']}, device {device['device']}: {', '.join([*faults, *device['notes']])}")


def _show_limits(page: dict[str, Any], output: Format) -> None:
    if output is Format.JSON:
        print_json(page)
        return
    rows = [
        (
            node["node"],
            _seconds(node["silence_s"]),
            f"{node['phi']:.1f}",
            _seconds(node["ask_s"]),
            _seconds(node["limit_s"]),
            node["source"],
            _seconds(node["median_delay_s"]),
            _seconds(node["longest_delay_s"]),
            node["samples"],
        )
        for node in page["items"]
    ]
    columns = ("NODE", "SILENT S", "PHI", "ASK S", "LIMIT S", "FROM", "MEDIAN LATE S", "LONGEST LATE S", "SAMPLES")
    wide = output is Format.WIDE
    least = ("MEDIAN LATE S", "SAMPLES", "LONGEST LATE S", "ASK S", "PHI")
    print_table(columns, rows, empty="no nodes", least=least, wide=wide)
    ranks = [
        (
            rank["worker"],
            rank["task"],
            f"rank {rank['rank']}",
            rank["phase"],
            _seconds(rank["age_s"]),
            _seconds(rank["limit_s"]),
            rank["source"],
            _seconds(rank["quantile_s"]),
            rank["samples"],
        )
        for node in page["items"]
        for rank in node["ranks"]
    ]
    if ranks:
        print()
        columns = ("WORKER", "TASK", "RANK", "PHASE", "STILL S", "LIMIT S", "FROM", "P99 S", "SAMPLES")
        print_table(columns, ranks, empty="", least=("SAMPLES", "P99 S", "FROM", "RANK"), wide=wide)


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
