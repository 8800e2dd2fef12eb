"""``unicron nodes``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.options import Format, Output, Server, connected
from cli.output import clock, print_table, printed_json

DEVICE_COLUMNS = ("TEMP", "BUSY", "MEMORY", "DRIVER")
"""What there is of devices alone, at the end of the table."""

COLUMNS = ("NODE", "STATE", "WORKER", "DEVICE", "DOES", "TASK", "RANK", "LAST HEARTBEAT", *DEVICE_COLUMNS)

LEAST = ("DRIVER", "LAST HEARTBEAT", "RANK", "MEMORY", "BUSY", "TEMP")
"""Columns in the order in which they are left out where lines are short."""

Detector = Annotated[bool, typer.Option("--detector", help="The limits by which the detector judges them now.")]


def nodes(server: Server = None, detector: Detector = False, output: Output = Format.TEXT) -> None:
    """List nodes and their workers."""
    with connected(server) as client:
        if detector:
            _show_limits(client.pages("/v1/limits"), output)
            return
        page = client.pages("/v1/nodes")
    if printed_json(page, output):
        return
    _show_nodes(page["items"], wide=output is Format.WIDE)


def _show_nodes(nodes: list[dict[str, Any]], *, wide: bool) -> None:
    rows = [_row(node, worker) for node in nodes for worker in node["workers"]]
    columns = list(COLUMNS)
    if not any(node.get("devices") for node in nodes):
        # Columns that no CPU fills.
        rows = [row[: -len(DEVICE_COLUMNS)] for row in rows]
        columns = columns[: -len(DEVICE_COLUMNS)]
    print_table(columns, rows, empty="no nodes", least=LEAST, wide=wide)
    for node in nodes:
        if node["reason"]:
            print(f"{node['name']} is {node['state']}: {node['reason']}")
        for report in node.get("reports", []):
            print(f"{node['name']}, {_reported(report)}")
        for device in node.get("devices", []):
            faults = [f"{fault} {count} times" for fault, count in device["faults"].items()]
            if said := [*faults, *device["notes"]]:
                print(f"{node['name']}, device {device['device']}: {', '.join(said)}")


def _reported(report: dict[str, Any]) -> str:
    """Return what a monitor reports of a node, and what has followed, in words."""
    said = (
        f"{report['severity']} of {report['actor']}: {report['key']}{': ' * bool(report['reason'])}{report['reason']}"
    )
    until = f"; the node goes away at {clock(report['deadline_at'])} UTC" if report["deadline_at"] else ""
    follows = report["answer"] or (f"not acted on: {report['held']}" if report["held"] else "not acted on")
    return f"{said}{until} ({follows})"


def _row(node: dict[str, Any], worker: dict[str, Any]) -> tuple[object, ...]:
    """Return what the table says of a worker. An older server says nothing of devices."""
    rank = None if worker["rank"] is None else f"rank {worker['rank']}"
    slow = worker["slowdown"]
    does = worker["state"] if slow == 1.0 else f"{worker['state']}, {slow:.3g}x slow"
    device: dict[str, Any] = next((one for one in node.get("devices", []) if one["device"] == worker.get("device")), {})
    celsius, percent = device.get("temperature_c"), device.get("utilisation_percent")
    return (
        node["name"],
        node["state"],
        worker["worker"],
        device.get("name") or node.get("hardware"),
        does,
        worker["task"],
        rank,
        clock(node["last_heartbeat_at"]),
        None if celsius is None else f"{celsius} C",
        None if percent is None else f"{percent}%",
        memory(device.get("memory_used_bytes"), device.get("memory_bytes")),
        device.get("driver"),
    )


def memory(used_bytes: int | None, all_bytes: int | None) -> str | None:
    """Return the memory of a device that is used, of all that it has, in GB."""
    if all_bytes is None:
        return None
    used = "" if used_bytes is None else f"{used_bytes / 1e9:.1f} of "
    return f"{used}{all_bytes / 1e9:.1f} GB"


def _show_limits(page: dict[str, Any], output: Format) -> None:
    if printed_json(page, output):
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
