"""The predicted throughput of a model on some workers: checks the input and returns plain data.

``unicron plan throughput`` and ``POST /v1/plan/throughput`` print this.
"""

from __future__ import annotations

from typing import Any

from shared.errors import InvalidInput
from shared.planning.performance import hardware as profiles
from shared.planning.performance.calibration import stack
from shared.planning.performance.gpt import Shape, hardware_flop, model_flop
from shared.planning.performance.hardware import Hardware
from shared.planning.performance.parallel_config import RECOMPUTES, ParallelConfig
from shared.planning.performance.search import Estimate, Pins, best, estimate
from shared.tasks.specification import ModelShape

LIMITS = {
    "layers": 10_000,
    "hidden": 1_000_000,
    "heads": 10_000,
    "sequence_length": 1_000_000,
    "vocabulary": 1_000_000,
    "global_batch": 1_000_000,
    "workers": 1_000_000,
    "tensor": 1_000_000,
    "pipeline": 10_000,
    "micro_batch": 1_000_000,
    "interleave": 10_000,
}
"""Greatest value of each count: far above any real one, so that a slip is refused at once."""


def model_shape(*, layers: int, hidden: int, heads: int, sequence_length: int, vocabulary: int) -> ModelShape:
    """Return the model of these sizes.

    Raises:
        InvalidInput: a size that is not positive or is beyond its limit.
    """
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "sequence_length": sequence_length,
        "vocabulary": vocabulary,
    }
    _check_counts(sizes)
    return ModelShape.model_validate(sizes)


def throughput(
    model: ModelShape,
    *,
    global_batch: int,
    workers: int,
    hardware: str | Hardware = "a100-80",
    tensor: int | None = None,
    pipeline: int | None = None,
    micro_batch: int | None = None,
    recompute: str | None = None,
    interleave: int | None = None,
    sequence_parallel: bool | None = None,
    distributed_optimizer: bool | None = None,
    overlap: bool = True,
) -> dict[str, Any]:
    """Predict one update of ``model`` on exactly ``workers`` workers, in the best or in a pinned configuration.

    Arguments that are given are pinned; those that are None are searched. ``overlap`` is as in ``ParallelConfig``. A
    configuration pinned in tensor, pipeline and micro-batch is evaluated even where it does not fit; ``fits`` and
    ``reasons`` say so.

    Returns: ``iteration_s``: seconds of one update. ``layout``: the sizes and choices, with the layers of each stage.
    ``flop_per_s_per_worker``: *model* FLOP/s, 72 B s l h^2 (1 + s / 6h + v / 12 l h) over time and workers (SC'21 and
    Korthikanti et al.). ``hardware_flop_per_s_per_worker``: the same with recomputation, as in the tables of SC'21 (96
    in place of 72 for full recomputation). ``mfu``: model FLOP/s over the data-sheet peak. ``memory_bytes``: that of
    the most loaded worker. ``fits``: whether that is within the device memory and the configuration is possible.
    ``breakdown``: seconds of each part; they add up to ``iteration_s``. ``memory``: bytes of each part. ``reasons``:
    why the configuration does not fit, and what is unusual. Where there is no configuration at all, the numbers are
    None.

    Raises:
        InvalidInput: a count that is not positive or is beyond its limit, unknown hardware, sizes that do not divide.
    """
    device = profiles.profile(hardware) if isinstance(hardware, str) else hardware
    pins = Pins(
        tensor,
        pipeline,
        micro_batch,
        interleave,
        _recompute(recompute),
        sequence_parallel,
        distributed_optimizer,
        overlap=overlap,
    )
    shape = Shape.of(model)
    _check(shape, global_batch, workers, pins)
    if tensor is not None and pipeline is not None and micro_batch is not None:
        found: Estimate | None = _pinned(shape, global_batch, workers, device, pins)
    else:
        fitting, nearest = best(shape, global_batch, workers, device, pins)
        found = fitting or nearest
    if found is None:
        return _nothing(global_batch, workers, pins)
    return _answer(shape, global_batch, found, device)


def _recompute(value: str | None) -> Any:
    if value is not None and value not in RECOMPUTES:
        raise InvalidInput.of("recompute", value, f"must be one of {', '.join(RECOMPUTES)}")
    return value


def _check(shape: Shape, global_batch: int, workers: int, pins: Pins) -> None:
    """Refuse counts beyond their limits, and pinned sizes that do not divide what they share."""
    counts = {**shape._asdict(), "global_batch": global_batch, "workers": workers}
    counts |= {name: value for name, value in pins._asdict().items() if name in LIMITS and value is not None}
    _check_counts(counts)
    t, p, b, v = pins.tensor or 1, pins.pipeline or 1, pins.micro_batch or 1, pins.interleave or 1
    rules = [
        (shape.hidden % shape.heads == 0, "heads", shape.heads, f"must divide hidden, {shape.hidden}"),
        (shape.heads % t == 0, "tensor", t, f"must divide heads, {shape.heads}"),
        (p <= shape.layers, "pipeline", p, f"must not exceed layers, {shape.layers}"),
        (global_batch % b == 0, "micro_batch", b, f"must divide global_batch, {global_batch}"),
        (workers % (t * p) == 0, "workers", workers, f"must be a multiple of tensor x pipeline, {t * p}"),
        (v == 1 or pins.pipeline != 1, "interleave", v, "needs a pipeline of more than 1"),
        (v == 1 or p * v <= shape.layers, "interleave", v, f"times pipeline must not exceed layers, {shape.layers}"),
    ]
    errors = [{"field": name, "value": value, "problem": text} for holds, name, value, text in rules if not holds]
    if errors:
        raise _refused(errors)


def _check_counts(counts: dict[str, Any]) -> None:
    errors = []
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LIMITS[name]:
            shown = value if isinstance(value, int | str) else repr(value)
            errors.append({"field": name, "value": shown, "problem": f"must be an integer from 1 to {LIMITS[name]}"})
    if errors:
        raise _refused(errors)


def _refused(errors: list[dict[str, Any]]) -> InvalidInput:
    return InvalidInput("; ".join(f"{e['field']}: {e['value']} {e['problem']}" for e in errors), errors)


def _pinned(shape: Shape, global_batch: int, workers: int, hardware: Hardware, pins: Pins) -> Estimate:
    """Return the estimate for pinned sizes: of the open choices, the best that fits, or the one of least memory."""
    fitting, nearest = best(shape, global_batch, workers, hardware, pins)
    if fitting is not None or nearest is not None:
        found = fitting or nearest
        assert found is not None
        return found
    # The search refuses schedules that leave a replica idle. A pinned configuration is evaluated, with the reason.
    t, p, b = pins.tensor or 1, pins.pipeline or 1, pins.micro_batch or 1
    config = ParallelConfig(
        t, p, workers // (t * p), b, pins.interleave or 1, pins.recompute or "full",
        t > 1 if pins.sequence_parallel is None else pins.sequence_parallel, bool(pins.distributed_optimizer),
        pins.overlap,
    )  # fmt: skip
    return estimate(shape, global_batch, config, hardware, stack(hardware.stack))


def _nothing(global_batch: int, workers: int, pins: Pins) -> dict[str, Any]:
    """Return the answer where there is no configuration at all."""
    reason = (
        f"no layout of exactly {workers} workers divides the model and leaves every replica at least one of the "
        f"micro-batches of a global batch of {global_batch}"
    )
    return {
        "iteration_s": None,
        "layout": None,
        "flop_per_s_per_worker": None,
        "hardware_flop_per_s_per_worker": None,
        "mfu": None,
        "memory_bytes": None,
        "fits": False,
        "breakdown": None,
        "memory": None,
        "reasons": [reason],
    }


def _answer(shape: Shape, global_batch: int, found: Estimate, hardware: Hardware) -> dict[str, Any]:
    """Return the answer of ``throughput`` for an estimate."""
    config, seconds = found.config, found.iteration_s
    problems, remarks = _reasons(shape, global_batch, found, hardware)
    per_worker = model_flop(shape, global_batch) / seconds / config.workers
    executed = hardware_flop(shape, global_batch, config.recompute) / seconds / config.workers
    return {
        "iteration_s": seconds,
        "layout": {
            **config._asdict(),
            "workers": config.workers,
            "micro_batches": config.micro_batches(global_batch),
            "stage_layers": list(found.stage_layers),
        },
        "flop_per_s_per_worker": per_worker,
        "hardware_flop_per_s_per_worker": executed,
        "mfu": per_worker / hardware.peak_flop_per_s,
        "memory_bytes": int(found.memory.total_bytes),
        "fits": not problems,
        "breakdown": found.breakdown._asdict(),
        "memory": {name: int(value) for name, value in found.memory._asdict().items()},
        "reasons": problems + remarks,
    }


def _reasons(shape: Shape, global_batch: int, found: Estimate, hardware: Hardware) -> tuple[list[str], list[str]]:
    """Return what makes the configuration impossible, and what is only unusual about it."""
    config = found.config
    problems, remarks = [], []
    need, have = found.memory.total_bytes, hardware.memory_bytes
    if need > have:
        problems.append(f"needs {need / 1e9:.1f} GB of {have / 1e9:.1f} GB on the most loaded worker")
    batches = global_batch // config.micro_batch
    if config.data > batches:
        problems.append(f"{config.data} replicas share {batches} micro-batches: some have none")
    elif batches % config.data:
        most = config.micro_batches(global_batch)
        remarks.append(f"{batches} micro-batches over {config.data} replicas: the most loaded one has {most}")
    if config.interleave > 1 and config.micro_batches(global_batch) % config.pipeline:
        remarks.append("interleaving with micro-batches that are no multiple of the pipeline needs padding")
    if config.tensor > hardware.workers_per_node:
        remarks.append(f"tensor groups of {config.tensor} cross nodes of {hardware.workers_per_node}")
    if shape.layers % config.pipeline:
        remarks.append(f"uneven stages of {min(found.stage_layers)} to {max(found.stage_layers)} layers")
    return problems, remarks
