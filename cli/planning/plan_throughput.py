"""``unicron plan throughput``: how fast a model would train on so many workers. Needs no cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Format, Output
from cli.output import print_fields, printed_json


def throughput(
    layers: Annotated[int, typer.Option(help="Transformer layers.")],
    hidden: Annotated[int, typer.Option(help="Hidden size.")],
    heads: Annotated[int, typer.Option(help="Attention heads; must divide the hidden size.")],
    sequence_length: Annotated[int, typer.Option(help="Tokens in a sequence.")],
    global_batch: Annotated[int, typer.Option(help="Sequences in one update.")],
    workers: Annotated[int, typer.Option(help="Workers to use, all of them.")],
    vocabulary: Annotated[int, typer.Option(help="Rows of the embedding, padding included.")] = 51200,
    hardware: Annotated[
        str, typer.Option(help="v100, a100-40, a100-80, a800-80, h100, h200, b200 or cpu.")
    ] = "a100-80",
    tensor: Annotated[int | None, typer.Option(help="Tensor-parallel size. Searched if not given.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Pipeline-parallel size. Searched if not given.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences in a micro-batch. Searched if not given.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full. Searched if not given.")] = None,
    interleave: Annotated[int | None, typer.Option(help="Model chunks a worker. Searched if not given.")] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option("--sequence-parallel/--no-sequence-parallel", help="With tensor parallelism by default."),
    ] = None,
    distributed_optimizer: Annotated[
        bool | None, typer.Option("--distributed-optimizer/--no-distributed-optimizer", help="Searched if not given.")
    ] = None,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap/--no-overlap",
            help="Data-parallel communication beside the passes, as Megatron-LM does, or after them.",
        ),
    ] = True,
    output: Output = Format.TEXT,
) -> None:
    """Predict the iteration time of a GPT model; sizes that are not given are searched.

    A layout pinned in full is evaluated even where it does not fit. FLOP/s are model FLOP/s: no recomputation counted.
    """
    from cli.progress import progress_bar
    from shared.planning.performance import model_shape
    from shared.planning.performance import throughput as predict

    model = model_shape(
        layers=layers, hidden=hidden, heads=heads, sequence_length=sequence_length, vocabulary=vocabulary
    )
    with progress_bar("layouts are searched"):
        answer = predict(
            model,
            global_batch=global_batch,
            workers=workers,
            hardware=hardware,
            tensor=tensor,
            pipeline=pipeline,
            micro_batch=micro_batch,
            recompute=recompute,
            interleave=interleave,
            sequence_parallel=sequence_parallel,
            distributed_optimizer=distributed_optimizer,
            overlap=overlap,
        )
    if printed_json(answer, output):
        return
    fields: list[tuple[str, object]] = [("fits", "yes" if answer["fits"] else "no")]
    fields += [("", reason) for reason in answer["reasons"]]
    if answer["layout"] is not None:
        fields += [(name, value) for name, value in answer["layout"].items() if name != "stage_layers"]
        fields += [
            ("iteration", f"{answer['iteration_s']:.3f} s"),
            ("model FLOP/s a worker", f"{answer['flop_per_s_per_worker'] / 1e12:.4g} T"),
            ("MFU", f"{answer['mfu']:.1%}"),
            ("memory a worker", f"{answer['memory_bytes'] / 1e9:.1f} GB"),
        ]
        fields += [(f"  {name.removesuffix('_s')}", f"{value:.3f} s") for name, value in answer["breakdown"].items()]
    print_fields(fields)
