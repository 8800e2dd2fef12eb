"""Megatron-LM's own training module, healed: ``pretrain()`` of a user's script, of which not a byte is changed.

    python -m unicron.megatron_lm pretrain_gpt.py --num-layers 32 ...

``script`` replaces ``megatron.training.pretrain`` before the script runs; ``pretraining`` drives Megatron's ``train()``
with the steps of this library; ``seams`` is the one table of what both need of Megatron-LM; ``settings`` says which
arguments are refused, and which are switched off.
"""

from unicron.megatron_lm.script import run_script

__all__ = ["run_script"]
