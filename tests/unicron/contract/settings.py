"""How the contract backend behaves in one process: said by environment variables of a rank, or by a unit test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal, cast

MODE = "UNICRON_TEST_CONTRACT"
"""``sockets`` or ``silent``, see ``Settings.mode``; empty: the process does not use the contract backend."""

MAKE_S = "UNICRON_TEST_CONTRACT_MAKE_S"
ABORT_S = "UNICRON_TEST_CONTRACT_ABORT_S"
NOTICE_S = "UNICRON_TEST_CONTRACT_NOTICE_S"
TIME_SCALE = "UNICRON_TEST_CONTRACT_TIME_SCALE"
SEED = "UNICRON_TEST_CONTRACT_SEED"
LAG_S = "UNICRON_TEST_CONTRACT_LAG_S"
AHEAD = "UNICRON_TEST_CONTRACT_AHEAD"
LEAVES_S = "UNICRON_TEST_CONTRACT_LEAVES_S"
DESTROY_MEETS = "UNICRON_TEST_CONTRACT_DESTROY_MEETS"
"""The attributes of ``Settings`` with these names."""

WORKER = "UNICRON_WORKER"

Mode = Literal["sockets", "silent"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a rank's environment says; the defaults are those of the tests."""

    mode: Mode = "sockets"
    """How a peer's death shows: ``sockets`` (NCCL's transport over a network: its watchdog notices, late, and what is
    issued from then on fails) or ``silent`` (NVLink and shared memory: nothing shows). In neither does a collective
    that waits for the peer end."""
    make_s: float = 0.05
    """How long the making of a communicator takes, give or take a half, once all ranks are there. On a device: some
    tenths of a second."""
    abort_s: float = 0.05
    """How long an abort takes, give or take a half."""
    notice_s: float = 0.1
    """How long after a connection is broken the communicator has an error that may be asked for."""
    time_scale: float = 0.1
    """What the times of torch's watchdog and heartbeat monitor are multiplied by: they are minutes."""
    seed: int = 0
    """Of how long each making and each abort takes."""
    lag_s: float = 0.0
    """For how long the device is behind the host: a mark is reached that much later. As a CUDA event is, it is reached
    once the stream has come to it, whether or not what the stream has waited for was aborted; what was issued and not
    waited for is on streams of its own."""
    ahead: str = ""
    """A file. While it is there the device stands still, as where a collective waits for a peer that does not come: the
    host goes on behind what it waits for, which only an abort ends from then on (``tests.unicron.contract.stream``).
    Whoever makes the file sees to it that the abort comes. Empty: there is none."""
    leaves_s: float = 0.0
    """How long the last of what a rank sends in a barrier is on its way. On a device: microseconds; where the rank's
    process is to end meanwhile, longer."""
    destroy_meets: bool = False
    """Whether the destroying of a communicator that was not aborted waits for all its ranks to do the same: NCCL from
    2.31.2 on, for the ranks of a node (``commDestroySync``)."""

    @classmethod
    def of_environment(cls, variables: Mapping[str, str] = os.environ) -> Settings | None:
        """Return what the environment says; None: the process does not use the contract backend.

        Raises:
            ValueError: a variable has no such value.
        """
        mode = variables.get(MODE, "")
        if not mode:
            return None
        if mode not in ("sockets", "silent"):
            raise ValueError(f"{MODE}={mode}")
        return cls(
            mode=cast("Mode", mode),
            make_s=float(variables.get(MAKE_S, cls.make_s)),
            abort_s=float(variables.get(ABORT_S, cls.abort_s)),
            notice_s=float(variables.get(NOTICE_S, cls.notice_s)),
            time_scale=float(variables.get(TIME_SCALE, cls.time_scale)),
            seed=int(variables.get(SEED, cls.seed)),
            lag_s=float(variables.get(LAG_S, cls.lag_s)),
            ahead=variables.get(AHEAD, cls.ahead),
            leaves_s=float(variables.get(LEAVES_S, cls.leaves_s)),
            destroy_meets=variables.get(DESTROY_MEETS, "") == "1",
        )

    def stands_still(self) -> bool:
        """Return whether the device stands still."""
        return bool(self.ahead) and os.path.exists(self.ahead)

    def random(self) -> Random:
        """Return this process's source of jitter: another one in each worker, the same in each run."""
        return Random(f"{self.seed}/{os.environ.get(WORKER, '')}")
