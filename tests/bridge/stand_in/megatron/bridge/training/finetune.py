"""Another entry."""

from megatron.bridge.training.pretrain import pretrain

__all__ = ["pretrain"]
