"""Lost nodes and reports of devices of ``benchmarks.detection``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import psutil

from benchmarks.detection_lab import Lab, laboratory, unix_s
from benchmarks.detection_measures import Measures
from benchmarks.report import Report
from cli.waiting import Record
from shared.errors import TimedOut, UnicronError

NODES = 3
"""Of the stack: one is lost at a time, and the others are witnesses of it."""

INJECTIONS = 30
START_S = 120.0
"""Longest time until a node is ready again: its fork server imports torch."""

XID = "xid=79"
"""The device has fallen off the bus."""

MEASURES = {
    "node-dropped": Measures("node lost, connection dropped", INJECTIONS, bound=0.5, unit="s", paper="5.6 s"),
    "node-silent": Measures("node lost, silently", INJECTIONS, bound=2.0, unit="s", paper="5.6 s"),
    "xid": Measures("Xid, to the incident", INJECTIONS, bound=0.05, unit="s", paper="-"),
}


async def course(names: Sequence[str], ranks: int, scale: float, report: Report) -> None:
    """Run the classes of faults that strike a node."""
    async with laboratory(nodes=NODES) as lab:
        for name in names:
            measures = MEASURES[name]
            measures.scale(scale)
            try:
                for number in measures.numbers():
                    node = lab.stack.node_names[number % NODES]
                    await lab.forget()
                    await (report_of_device(lab, node, measures) if name == "xid" else lost(lab, node, name, measures))
            except (TimedOut, UnicronError) as err:
                measures.give_up(err.detail)
            measures.judge(report)


async def lost(lab: Lab, node: str, name: str, measures: Measures) -> None:
    """End or stop all processes of a node, the agent's first; then start the node again."""
    if name == "node-silent":
        processes = lab.stack.node_processes(node)
        at_s = time.time()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
    else:
        at_s = await lab.stack.kill_node(node)
    try:
        error = await lab.event(f"{node} is lost", lambda record: is_of_node(record, node, "node-lost"))
        measures.add(unix_s(error["recorded_at"]) - at_s, node=node)
    finally:
        await lab.stack.kill_node(node)
    await lab.stack.start_node(node)
    await shown(lab, node, "ready")


async def report_of_device(lab: Lab, node: str, measures: Measures) -> None:
    """Have a device report an Xid; the time begins with the event in the log, right before the agent is asked."""
    await lab.client.post(f"/v1/nodes/{node}/faults", {"fault": XID})
    injected = await lab.event("the fault is logged", lambda record: record["type"] == "fault.injected")
    error = await lab.event(f"an incident of {node}", lambda record: is_of_node(record, node, "device"))
    measures.add(unix_s(error["recorded_at"]) - unix_s(injected["recorded_at"]), node=node)
    await shown(lab, node, "isolated")  # before that, there is nothing to return
    await lab.client.post(f"/v1/nodes/{node}/return")
    await shown(lab, node, "ready")


async def shown(lab: Lab, node: str, state: str) -> None:
    """Wait until the interface shows a node in a state."""

    async def is_shown() -> bool:
        return bool((await lab.client.get(f"/v1/nodes/{node}"))["state"] == state)

    await lab.client.until(f"{node} is {state}", is_shown, START_S)


def is_of_node(record: Record, node: str, kind: str) -> bool:
    """Return whether a record is an error of this kind of a node."""
    event = record["event"]
    return bool(record["type"] == "error.detected" and event["node"] == node and event["kind"] == kind)
