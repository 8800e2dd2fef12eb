"""megatron-bridge's ``pretrain()``, healed: a user's script and its configuration stay as they are.

    python -m unicron.bridge train.py ...

Bridge's own ``train()`` runs on the library's steps (``unicron.megatron_lm.healed_training``). ``script`` replaces
``megatron.bridge.training.pretrain.pretrain`` before the script runs; ``seams`` is the one table of what the adapter
needs of megatron-bridge; ``settings`` says which settings are refused, and which are switched off. Before a task
starts, ``fields`` asks a script for its settings.
"""

from unicron.bridge.script import run_script

__all__ = ["run_script"]
