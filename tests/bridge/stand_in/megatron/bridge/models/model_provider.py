"""What makes a model, wrapped."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config


class ModelProviderMixin:
    """A class with ``provide()``, which makes the model."""

    def provide_distributed_model(
        self,
        ddp_config: Any = None,
        model_type: Any = None,
        overlap_param_gather_with_optimizer_step: bool = False,
        fp16: Any = None,
        bf16: Any = None,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        wrap_with_ddp: bool = True,
        data_parallel_random_init: bool = True,
        use_cpu_initialization: Any = False,
        init_model_with_meta_device: Any = None,
        pre_wrap_hook: Any = None,
        post_wrap_hook: Any = None,
        mixed_precision_wrapper: Any = None,
        *,
        pg_collection: Any = None,
    ) -> list[DistributedDataParallel]:
        module = self.provide()  # type: ignore[attr-defined]
        return [DistributedDataParallel(get_model_config(module), ddp_config, module)]
