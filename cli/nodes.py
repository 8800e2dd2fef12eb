"""``unicron nodes``."""

from __future__ import annotations

from cli.options import Format, Output, Server
from cli.output import clock, print_json, print_table


def nodes(server: Server = None, output: Output = Format.TEXT) -> None:
    """List nodes and their workers."""
    from cli.client import Client

    with Client(server) as client:
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
    print_table(columns, rows, empty="no nodes")
    for node in page["items"]:
        if node["reason"]:
            print(f"{node['name']} is {node['state']}: {node['reason']}")
        for device in node.get("devices", []):
            faults = [f"{fault} {count} times" for fault, count in device["faults"].items()]
            print(f"{node['name']}, device {device['device']}: {', '.join([*faults, *device['notes']])}")
