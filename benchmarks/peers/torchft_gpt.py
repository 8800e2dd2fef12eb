"""The job under torchft: every rank is a replica group of its own, as in its examples of data-parallel training.

A step that loses a replica is not committed; the remaining replicas repeat it. The lost replica's samples are skipped
until it is back: torchft averages over the replicas that take part.
"""

from __future__ import annotations

import os
import time

from torchft import Manager, ProcessGroupGloo

from benchmarks.peers.job import COLLECTIVE_TIMEOUT, Job, PlainGpt, start


def main() -> None:
    """Train to the end."""
    start()
    rank, ranks = int(os.environ["RECOVERY_RANK"]), int(os.environ["RECOVERY_RANKS"])
    job = Job()
    gpt = PlainGpt(job)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE_TIMEOUT),
        load_state_dict=gpt.load,
        state_dict=gpt.state,
        min_replica_size=1,
        timeout=COLLECTIVE_TIMEOUT,
        replica_id=f"replica-{rank}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    job.note("ready", rank=rank, step=0, ranks=ranks)
    # Without this the first replica that is up would begin alone.
    while len({note["rank"] for note in job.noted("ready")}) < ranks:
        time.sleep(0.05)
    while (step := manager.current_step() + 1) <= job.spec.steps:
        manager.start_quorum()
        gpt.compute(rank, step, job.own(rank, ranks), ranks)
        # The average over all of them is the sum that the update needs.
        gpt.gradients.mul_(ranks)
        manager.allreduce(gpt.gradients).wait()
        if manager.should_commit():
            gpt.optimizer.step()
            # One that has just been healed is further than it knew when it began.
            job.note("done", rank=rank, step=manager.current_step(), ranks=manager.num_participants())
    if rank == 0:
        job.save(gpt.model)
    manager.shutdown(wait=False)
    # Threads of a group that lost a peer may still wait for it.
    os._exit(0)


if __name__ == "__main__":
    main()
