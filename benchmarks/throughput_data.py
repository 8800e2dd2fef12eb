"""Published measurements of training iterations, as layouts and seconds; the files are in ``data/throughput``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from shared.planning.performance.gpt import Shape, hardware_flop, model_flop
from shared.planning.performance.hardware import profile
from shared.planning.performance.parallel_config import RECOMPUTES, ParallelConfig
from shared.planning.performance.search import Pins, best

DATA = Path(__file__).parent / "data" / "throughput"


class Row(NamedTuple):
    """One measured iteration."""

    source: str
    name: str
    shape: Shape
    global_batch: int
    layout: ParallelConfig
    hardware: str
    measured_s: float


def _read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def korthikanti() -> list[Row]:
    """Korthikanti et al., MLSys'23, table 5: both of its times for each model."""
    rows = []
    for r in _read("korthikanti_table5_a100.csv"):
        shape = Shape(int(r["layers"]), int(r["hidden"]), int(r["heads"]), 2048, 51200)
        t, p, v, b = (int(r[key]) for key in ("tp", "pp", "interleave_m", "micro_batch"))
        full = ParallelConfig(t, p, 1, b, v, "full")
        selective = full._replace(recompute="selective", sequence_parallel=True)
        for layout, column in ((full, "iter_s_full_recompute"), (selective, "iter_s_seqpar_selective")):
            name = f"{r['model']} {layout.recompute}"
            rows.append(Row("korthikanti", name, shape, int(r["global_batch"]), layout, "a100-80", float(r[column])))
    return rows


def sc21() -> list[Row]:
    """Narayanan et al., SC'21, table 1: weak scaling, full recomputation; times derived from its TFLOP/s."""
    rows = []
    for r in _read("sc21_table1_a100_weak_scaling.csv"):
        shape = Shape(*(int(r[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
        p = int(r["pp"])
        virtual = r["layers_per_virtual_stage"]
        v = shape.layers // p // int(virtual) if virtual else 1
        layout = ParallelConfig(int(r["tp"]), p, int(r["dp"]), int(r["micro_batch"]), v, "full")
        rows.append(
            Row("sc21", r["model"], shape, int(r["global_batch"]), layout, "a100-80", float(r["derived_iter_s"]))
        )
    return rows


def mtnlg() -> list[Row]:
    """Smith et al., 2022, Megatron-Turing NLG 530B: full recomputation, no interleaving, DeepSpeed's pipeline."""
    shape = Shape(105, 20480, 128, 2048, 51200)
    rows = []
    for r in _read("mtnlg_530B_a100.csv"):
        t, p, gpus = int(r["tp"]), int(r["pp"]), int(r["gpus"])
        layout = ParallelConfig(t, p, gpus // (t * p), 1, 1, "full")
        rows.append(Row("mtnlg", f"530B {gpus}", shape, int(r["global_batch"]), layout, "a100-80", float(r["iter_s"])))
    return rows


def megatron2020() -> list[Row]:
    """Shoeybi et al., 2019 (version of 2020): tensor parallelism, one micro-batch a replica, full recomputation."""
    rows = []
    for r in _read("megatron_2020_tp_scaling_v100_a100.csv"):
        shape = Shape(*(int(r[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
        d, batch = int(r["dp"]), int(r["global_batch"])
        layout = ParallelConfig(int(r["tp"]), 1, d, batch // d, 1, "full")
        kind = "v100" if r["gpu"].startswith("V100") else "a100-40"
        rows.append(
            Row(
                "megatron2020",
                f"{r['case']} {kind} x{r['gpus']}",
                shape,
                batch,
                layout,
                kind,
                float(r["iter_ms"]) / 1e3,
            )
        )
    return rows


VTRAIN_VOCABULARY = 50257
"""Default of the published simulator's configuration; the rows name none. It is odd, and that shows in the times."""

PADDED_VOCABULARY = 51200
"""The vocabulary of the other tables: GPT-2's, padded as Megatron-LM pads it."""


def vtrain(vocabulary: int = VTRAIN_VOCABULARY) -> list[Row]:
    """Bang et al., MICRO'24 (vTrain): 1,440 single-node iterations on up to 8 A100."""
    rows = []
    for r in _read("vtrain_ground_truth_single.csv"):
        value = {key.strip("# ").lower(): text for key, text in r.items()}
        shape = Shape(
            int(value["layers"]), int(value["hidden size"]), int(value["attention heads"]),
            int(value["sequence length"]), vocabulary,
        )  # fmt: skip
        layout = ParallelConfig(
            int(value["tensor parallelism"]), int(value["pipeline parallelism"]), int(value["data parallelism"]),
            int(value["micro batch"]),
        )  # fmt: skip
        seconds = float(value["iteration time (ms)"]) / 1e3
        name = f"l{shape.layers} h{shape.hidden} B{value['global batch']} {layout[:4]}"
        rows.append(Row("vtrain", name, shape, int(value["global batch"]), layout, "a100-80", seconds))
    return rows


def held_out() -> list[Row]:
    """Published runs that nothing is fitted to; the set is the row's source. The folder's README names the origins."""
    rows = []
    for r in _read("held_out.csv"):
        shape = Shape(*(int(r[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
        batch, gpus = int(r["global_batch"]), int(r["gpus"])
        layout = _published_layout(r, gpus) if r["tp"] else _searched_layout(shape, batch, gpus, r["hardware"])
        if r["iter_s"]:
            seconds = float(r["iter_s"])
        elif r["model_tflops_per_gpu"]:
            seconds = model_flop(shape, batch) / (gpus * float(r["model_tflops_per_gpu"]) * 1e12)
        else:
            flop = hardware_flop(shape, batch, layout.recompute)
            seconds = flop / (gpus * float(r["hardware_tflops_per_gpu"]) * 1e12)
        rows.append(Row(r["set"], r["name"], shape, batch, layout, r["hardware"], seconds))
    return rows


def _published_layout(r: dict[str, str], gpus: int) -> ParallelConfig:
    t, p, v, b = (int(r[key]) for key in ("tp", "pp", "interleave", "micro_batch"))
    recompute = RECOMPUTES[RECOMPUTES.index(r["recompute"])]
    sequence, sharded = r["sequence_parallel"] == "1", r["distributed_optimizer"] == "1"
    return ParallelConfig(t, p, gpus // (t * p), b, v, recompute, sequence, sharded)


def _searched_layout(shape: Shape, global_batch: int, gpus: int, hardware: str) -> ParallelConfig:
    fitting, _ = best(shape, global_batch, gpus, profile(hardware), Pins())
    if fitting is None:
        raise ValueError(f"no layout of {shape} fits {gpus} x {hardware}")
    return fitting.config


def choices(rows: list[Row]) -> list[list[Row]]:
    """Rows of the same model, batch and number of workers, where several layouts were measured."""
    groups: dict[tuple[Shape, int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.shape, row.global_batch, row.layout.workers), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def all_reduce(workers: int) -> list[tuple[int, float]]:
    """NCCL all-reduce inside one A100 node (vTrain's look-up table): bytes, seconds (mean of its two runs)."""
    with (DATA / f"vtrain_a100_allreduce_{workers}gpu_lut.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [(int(r[0]), (float(r[3]) + float(r[5])) / 2e9) for r in rows]


SETS = {
    "korthikanti": korthikanti,
    "sc21": sc21,
    "mtnlg": mtnlg,
    "megatron2020": megatron2020,
    "vtrain": vtrain,
}
