"""Dropout whose random numbers depend on the micro-batch and the layer, not on the rank that computes them."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch

from unicron.trainer.spec import Spec

_TRACKED = "model-parallel-rng"
"""Megatron's name for the random generator of activations that tensor-parallel ranks split."""


class Dropout:
    """Reseeds the random generators before each layer, from seed, step, micro-batch, layer and tensor-parallel rank.

    So a micro-batch gets the same random numbers on every rank that computes it, and each time that it is computed.
    """

    def __init__(self, spec: Spec, model: Any) -> None:
        """Register hooks on the model's layers, unless the specification has no dropout.

        Args:
            spec: the task.
            model: a GPT in Megatron's DistributedDataParallel.
        """
        from megatron.core import tensor_parallel

        self._seed = spec.seed
        self._step, self._micro_batch = 0, 0
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add(_TRACKED, spec.seed)  # attention forks this generator even without dropout
        if spec.dropout == 0.0:
            return
        # Layer 0 stands for the embedding, which is called before the decoder's first layer.
        model.module.register_forward_pre_hook(partial(self._reseed, 0))
        for layer in model.module.decoder.layers:
            layer.register_forward_pre_hook(partial(self._reseed, layer.layer_number))

    def set_micro_batch(self, step: int, micro_batch: int) -> None:
        """Set the micro-batch that is computed next; ``step`` counts from 1, ``micro_batch`` from 0."""
        self._step, self._micro_batch = step, micro_batch

    def _reseed(self, layer: int, module: Any, arguments: Any) -> None:
        from megatron.core import parallel_state, tensor_parallel

        rank = parallel_state.get_tensor_model_parallel_rank()
        seeds = []
        # Tensor-parallel ranks need the same numbers where each has the whole activation, others where they split it.
        for which in ("all", f"tensor {rank}"):
            text = f"{self._seed}/{self._step}/{self._micro_batch}/{layer}/{which}"
            seeds.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add(_TRACKED, seeds[1])
        torch.manual_seed(seeds[0])
