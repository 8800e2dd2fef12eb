"""``unicron cost``."""

from __future__ import annotations

from cli.options import Format, Output, Server
from cli.output import print_json, print_table

_PARTS = ("detection_worker_s", "transition_worker_s", "recompute_worker_s", "sub_healthy_worker_s", "lost_flop")


def cost(server: Server = None, output: Output = Format.TEXT) -> None:
    """Report what failures cost.

    Worker-seconds by task and by incident; the formulas are in services/api/claims.py.
    """
    from cli.client import Client

    with Client(server) as client:
        costs = client.get("/v1/costs")
    if output is Format.JSON:
        print_json(costs)
        return
    currency = costs["currency"]
    failure = ("DETECTION", "TRANSITION", "RECOMPUTE", "SUB-HEALTHY", "LOST FLOP")
    rows = []
    for row in (*costs["tasks"], {"task": "total", **costs["totals"]}):
        fraction = row["goodput_fraction"]
        goodput = None if fraction is None else f"{100 * fraction:.2f}%"
        times = (row["worker_s"], row["training_worker_s"], row["planned_worker_s"])
        rows.append((row["task"], *times, *(row[part] for part in _PARTS), row["flop"], goodput, row["money"]))
    columns = ("TASK", "WORKER-S", "TRAINING", "PLANNED", *failure, "FLOP", "GOODPUT", currency)
    print_table(columns, rows, empty="no tasks")
    print()
    incidents = [
        (row["incident"], row["kind"], row["severity"], *(row[part] for part in _PARTS), row["money"])
        for row in costs["incidents"]
    ]
    print_table(("INCIDENT", "WHAT", "SEV", *failure, currency), incidents, empty="no incidents")
    check = costs["sum_check"]
    print(
        f"\nsum check {'ok' if check['ok'] else 'FAILED'}: failures {check['by_task_worker_s']:.3f} worker-s by task, "
        f"{check['by_incident_worker_s']:.3f} by incident; parts {check['parts_worker_s']:.3f}, "
        f"held {check['held_worker_s']:.3f}; {costs['price_per_worker_hour']:g} {currency} per worker-hour"
    )
