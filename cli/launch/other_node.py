"""A further node of a ``srun``: this process runs the node's agent for the first one, and ends as that does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from cli.launch.interrupts import SIGNALS
from cli.launch.place import devices_of, division
from cli.launch.requeue import requeue
from cli.stack.child import Child
from cli.stack.children import Children
from cli.stack.devices import Device
from cli.stack.machine import agent_variables, environment_of, forget_memory
from cli.stack.meeting import Meeting, Offer
from cli.stack.stack import pause_s
from shared.errors import Unavailable, UnicronError
from shared.settings.model import read_settings

LOOK_S = 2.0
"""Time between two looks at the folder while the task trains."""

MOST_SAME = 60
"""Looks at which the first process may seem not to have moved: two minutes, in which a network file system may hide
what it does for one (``acregmax`` of NFS). Looks are counted, since one lasts as long as a file server is away."""


async def take_part(
    meeting: Meeting, run_dir: Path, in_front: Mapping[str, str], inherited: Mapping[str, str], device: Device
) -> int:
    """Run this node's agent until the first process has it end; return that one's exit status.

    Signals are left to the first process, which stops the task with a checkpoint: srun sends them to all.

    Args:
        meeting: where the first process is met.
        run_dir: the run directory.
        in_front: variables in front of the command, which may say which devices it uses.
        inherited: variables that the ranks inherit beside those of this process.
        device: what workers are to train on.

    Raises:
        UnicronError: the agent does not start or keeps ending, or the first process is not found, or is gone.
    """
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    try:
        await meeting.join()
        offer = await meeting.offered()
        if offer is None:
            return await meeting.ended()
        agent = _agent(meeting, run_dir, offer, _devices(in_front, device, offer), inherited)
    except UnicronError as err:
        meeting.refuse(err.detail)
        raise
    children = Children(lambda child, reason: pause_s(child, reason, [agent.name]))
    children.add(agent)
    try:
        try:
            await children.start()
        except UnicronError as err:
            meeting.refuse(err.detail)
            raise
        over = await _until_over(meeting, children.failed)
    finally:
        await children.stop([[agent.name]])
        forget_memory(read_settings().memory_dir, run_dir, meeting.node)
    if not over:
        raise Unavailable(f"the first process of this srun has ended without a word: {await requeue(os.environ)}")
    return await meeting.ended()


def _devices(in_front: Mapping[str, str], device: Device, offer: Offer) -> str:
    """Return this node's ``CUDA_VISIBLE_DEVICES``.

    Raises:
        NoDevice: it has fewer devices than the first node.
    """
    wanted = Device.CUDA if offer.on_devices else Device.CPU
    shown = division(devices_of(in_front, wanted), wanted, offer.workers_per_node).shown
    return shown[0] if shown else ""


def _agent(meeting: Meeting, run_dir: Path, offer: Offer, devices: str, inherited: Mapping[str, str]) -> Child:
    further = dict(inherited)
    if offer.interpreters:
        further["UNICRON_INTERPRETERS"] = offer.interpreters
    common = environment_of(run_dir, meeting.servers()[0], meeting.credential, further)
    own = agent_variables(meeting.node, devices, offer.workers_per_node)
    return Child(meeting.node, "services.agent.main", common | own, run_dir)


async def _until_over(meeting: Meeting, failed: asyncio.Future[UnicronError]) -> bool:
    """Wait until the first process has the agents end; return False if it is gone.

    Raises:
        UnicronError: the agent is not started again.
    """
    beat, same = 0, 0
    while not meeting.is_over:
        if failed.done():
            raise failed.result()
        await asyncio.sleep(LOOK_S)
        before, beat = beat, meeting.beat
        same = same + 1 if beat == before else 0
        if same > MOST_SAME:
            return False
    return True
