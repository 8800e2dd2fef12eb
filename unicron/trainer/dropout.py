"""Dropout whose random numbers depend on the micro-batch and the layer, not on the rank that computes them."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch

from unicron.megatron.model import config_of, model_chunks, unwrapped
from unicron.trainer.spec import Spec

_TRACKED = "model-parallel-rng"
"""Megatron's name for the random generator of activations that tensor-parallel ranks split."""

_MICRO_BATCH = "unicron-micro-batch"
"""Name under which Megatron's tracker of generators keeps step and micro-batch. Megatron saves what the tracker has in
a forward pass, and brings it back where activations are computed again: in a pipeline, after the forward passes of
later micro-batches."""


class Dropout:
    """Reseeds the random generators before each layer, from seed, step, micro-batch, layer and tensor-parallel rank.

    So a micro-batch gets the same random numbers on every rank that computes it, and each time that it is computed.
    """

    def __init__(self, spec: Spec, model: Any) -> None:
        """Register hooks on the model's layers, unless the specification has no dropout.

        Args:
            spec: the task.
            model: a GPT in Megatron's DistributedDataParallel, or its model chunks.
        """
        self._seed = spec.seed
        self._divides_sequence = config_of(model).sequence_parallel
        self._reseeds = spec.dropout > 0.0
        self._set_generators(spec.seed, step=0, micro_batch=0)  # attention uses a generator even without dropout
        if not self._reseeds:
            return
        # Layer 0 stands for the embedding, which is called before the decoder's first layer.
        for chunk in model_chunks(model):
            chunk.module.register_forward_pre_hook(partial(self._reseed, 0))
            for layer in unwrapped(chunk).decoder.layers:
                layer.register_forward_pre_hook(partial(self._reseed, layer.layer_number))

    def set_micro_batch(self, step: int, micro_batch: int) -> None:
        """Set the micro-batch that is computed next; ``step`` counts from 1, ``micro_batch`` from 0."""
        if self._reseeds:
            self._set_generators(self._seed, step=step, micro_batch=micro_batch)

    def _set_generators(self, seed: int, *, step: int, micro_batch: int) -> None:
        """Set what Megatron's tracker has: the state of a generator, and the micro-batch that it is for."""
        from megatron.core import tensor_parallel

        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        state = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)
        # Not ``reset`` and ``add``: with sequence parallelism layers are called where the tracked generator is in use.
        tensor_parallel.get_cuda_rng_tracker().set_states(
            {_TRACKED: state, _MICRO_BATCH: torch.tensor([step, micro_batch])}
        )

    def _reseed(self, layer: int, module: Any, arguments: Any) -> None:
        from megatron.core import parallel_state, tensor_parallel

        rank = parallel_state.get_tensor_model_parallel_rank()
        step, micro_batch = tensor_parallel.get_cuda_rng_tracker().get_states()[_MICRO_BATCH].tolist()
        seeds = []
        # Tensor-parallel ranks need the same numbers where each has the whole activation, different ones where they
        # split it.
        for which in ("all", f"tensor {rank}"):
            text = f"{self._seed}/{step}/{micro_batch}/{layer}/{which}"
            seeds.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1)
        self._set_generators(seeds[1], step=step, micro_batch=micro_batch)
        torch.manual_seed(seeds[1] if self._divides_sequence else seeds[0])
