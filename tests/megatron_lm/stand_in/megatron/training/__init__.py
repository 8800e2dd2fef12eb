"""A stand-in of this project's own for Megatron-LM's training module, which no package index has: for tests alone.

It has the names and parameters of every seam of core 0.16.1, as ``seams.json`` records them from a checkout
(``test_stand_in.py`` compares both), over the megatron-core that is installed: model, wrapper, optimizer, schedules,
timers and process groups are Megatron's. What it does between them is the least that trains: a loop with reports,
evaluations, checkpoints and exits.
"""

from megatron.training.global_vars import get_args, get_timers
from megatron.training.training import pretrain

__all__ = ["get_args", "get_timers", "pretrain"]
