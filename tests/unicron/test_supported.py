"""What the check of a user's model refuses (``unicron.megatron.supported``)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicron.errors import UnsupportedModel
from unicron.megatron import supported

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("megatron"),
    # Megatron's, about a default of its own.
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
]

REFUSED_SETTINGS = [
    ({"finalize_model_grads_func": print}, {}, 1),
    ({"fp8": "hybrid"}, {}, 1),
    ({"fp4": "e2m1"}, {}, 1),
    ({"context_parallel_size": 2}, {}, 1),
    ({"expert_model_parallel_size": 2}, {}, 1),
    ({"num_moe_experts": 4}, {}, 1),
    ({"mtp_num_layers": 1}, {}, 1),
    ({"enable_cuda_graph": True}, {}, 1),
    ({"external_cuda_graph": True}, {}, 1),
    ({"cuda_graph_impl": "local"}, {}, 1),
    ({"tp_comm_overlap": True}, {}, 2),
    ({"defer_embedding_wgrad_compute": True}, {}, 1),
    ({"delay_wgrad_compute": True}, {}, 1),
    ({"distribute_saved_activations": True}, {}, 2),
    ({}, {"overlap_param_gather": True}, 1),
    ({}, {"use_megatron_fsdp": True}, 1),
    ({}, {"num_distributed_optimizer_instances": 2}, 1),
]
"""Settings of a model and of its DistributedDataParallel, and the tensor-parallel size with which they are refused."""


def in_megatrons_wrapper(config: dict[str, Any], ddp: dict[str, Any]) -> Any:
    """Return a module that looks like a model of Megatron with these settings; all others are Megatron's defaults."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    model: Any = torch.nn.Linear(2, 1)
    model.module = torch.nn.Linear(2, 1)
    model.module.sharded_state_dict = dict
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    model.config = TransformerConfig(**sizes)
    model.ddp_config = DistributedDataParallelConfig()
    for settings, changed in ((model.config, config), (model.ddp_config, ddp)):
        for name, value in changed.items():
            assert hasattr(settings, name), "Megatron has no such setting"
            setattr(settings, name, value)  # some may not be given together with others
    return model


@pytest.mark.parametrize(
    ("config", "ddp", "tensor"), REFUSED_SETTINGS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_settings_of_megatron_that_would_train_wrongly(
    config: dict[str, Any], ddp: dict[str, Any], tensor: int
) -> None:
    model = in_megatrons_wrapper({}, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    supported.check(model, optimizer, tensor, 1)
    (name,) = (*config, *ddp)
    with pytest.raises(UnsupportedModel, match=f"{name}: must be"):
        supported.check(in_megatrons_wrapper(config, ddp), optimizer, tensor, 1)


def test_gradients_that_are_added_up_in_bfloat16_but_not_averaged() -> None:
    model = in_megatrons_wrapper({"bf16": True, "sequence_parallel": True, "qk_layernorm": True}, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.main_grad = torch.zeros(2, dtype=torch.bfloat16)
    supported.check(model, optimizer, 2, 1)
    model.weight.average_gradients_across_tp_domain = True
    with pytest.raises(UnsupportedModel, match="averages the gradients of weight"):
        supported.check(model, optimizer, 2, 1)
    model.config.has_cond_embedder = True
    with pytest.raises(UnsupportedModel, match="has_cond_embedder: must be False"):
        supported.check(model, optimizer, 1, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer_cpu_offload", True),
        ("main_params_dtype", torch.float16),
        ("exp_avg_dtype", torch.uint8),
        ("exp_avg_sq_dtype", torch.float16),
    ],
)
def test_settings_of_an_optimizer_that_keeps_its_state_elsewhere(name: str, value: Any) -> None:
    from megatron.core.optimizer import OptimizerConfig

    model = in_megatrons_wrapper({}, {})
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.config = OptimizerConfig()
    supported.check(model, optimizer, 1, 1)
    assert hasattr(optimizer.config, name)
    setattr(optimizer.config, name, value)
    with pytest.raises(UnsupportedModel, match=f"{name}: must be"):
        supported.check(model, optimizer, 1, 1)


def test_an_optimizer_that_keeps_a_state_by_the_type_of_a_parameter_has_parameters_of_one_type() -> None:
    from megatron.core.optimizer import OptimizerConfig

    model = in_megatrons_wrapper({}, {})
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.config = OptimizerConfig()
    optimizer.config.use_precision_aware_optimizer = True
    supported.check(model, optimizer, 1, 1)
    model.weight.data = model.weight.data.bfloat16()
    with pytest.raises(UnsupportedModel, match="use_precision_aware_optimizer: must be False, where"):
        supported.check(model, optimizer, 1, 1)


@pytest.mark.parametrize("distributed", [False, True])
def test_sums_apart_from_the_buffers_are_reduced_behind_the_passes_and_megatrons_hooks_send_nothing(
    distributed: bool,
) -> None:
    from unicron.gradients.accumulators import SeparateAccumulator
    from unicron.gradients.buffers import GradientBuffers

    def sends(*_: Any, **__: Any) -> None:
        raise AssertionError("a hook has sent the buffers")

    group: Any = SimpleNamespace(register_grad_ready=sends, start_grad_sync=sends, finish_grad_sync=sends)
    model = in_megatrons_wrapper({}, {"overlap_grad_reduce": True, "use_distributed_optimizer": distributed})
    model.bucket_groups, model.expert_parallel_bucket_groups = [group], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for sizes in ((1, 1), (2, 1), (1, 2)):
        supported.check(model, optimizer, *sizes)
    buffers = GradientBuffers(model, optimizer)
    assert buffers.overlapped(SeparateAccumulator(buffers.tensors, dtype=torch.float64)) is None
    group.register_grad_ready(model.module.weight)
    group.start_grad_sync()
    group.finish_grad_sync()


def test_gradients_are_sent_in_the_type_of_megatrons_buffers_and_those_of_a_plain_module_in_float32() -> None:
    from unicron.gradients.buffers import GradientBuffers
    from unicron.gradients.precision import Precision

    def sent(model: Any) -> torch.dtype:
        buffers = GradientBuffers(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return buffers.accumulator(1, precision=Precision.FLOAT32).load(0).dtype

    model: Any = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    assert sent(model) is torch.bfloat16
    assert sent(torch.nn.Linear(2, 1, dtype=torch.bfloat16)) is torch.float32


def test_a_batch_size_that_grows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import num_microbatches_calculator

    ramp = num_microbatches_calculator.RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size=8, micro_batch_size=1, data_parallel_size=1, decrease_batch_size_if_needed=False, rank=0,
        start_global_batch_size=4, batch_size_increment=4, ramup_samples=100,
    )  # fmt: skip
    monkeypatch.setattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", ramp)
    model = in_megatrons_wrapper({}, {})
    with pytest.raises(UnsupportedModel, match="rampup_batch_size: must be None"):
        supported.check(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, 1)


def test_models_that_torch_distributes_are_refused(tmp_path: Path) -> None:
    """Of FSDP2 (``fully_shard``) and of torch's tensor parallelism the parameters are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        fully_shard(model, mesh=mesh)
        with pytest.raises(UnsupportedModel, match=r"0\.weight is a DTensor \(FSDP2"):
            supported.check(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_that_cannot_be_split() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UnsupportedModel, match=r"set parallel\.tensor and parallel\.pipeline to 1"):
        supported.check(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, 1)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's own import
def test_optimizers_that_share_their_work_out_are_refused(tmp_path: Path) -> None:
    """Else the first fault finds parts of the state that no rank has."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 1)
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        supported.check(model, adam, 1, 1)
        layer_wise: Any = object.__new__(LayerWiseDistributedOptimizer)  # to be made it takes a GPU
        layer_wise.chained_optimizers = [SimpleNamespace(optimizer=adam)]
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        for optimizer in (layer_wise, zero, PostLocalSGDOptimizer(adam, PeriodicModelAverager(period=2))):
            with pytest.raises(UnsupportedModel, match=f"^optimizer: {type(optimizer).__name__} "):
                supported.check(model, optimizer, 1, 1)
    finally:
        torch.distributed.destroy_process_group()
