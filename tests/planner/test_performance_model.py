"""Properties of the throughput model at any sizes."""

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.planning import performance
from shared.planning.performance import profile
from shared.planning.performance.calibration import stack
from shared.planning.performance.collectives import Group, all_reduce_s, half_s
from shared.planning.performance.device_memory import device_memory
from shared.planning.performance.gpt import Shape, hardware_flop, model_flop
from shared.planning.performance.hardware import measured, names, sources
from shared.planning.performance.iteration import heaviest_parameters, iteration, stage_layers
from shared.planning.performance.layer import product_s
from shared.planning.performance.parallel_config import RECOMPUTES, ParallelConfig
from shared.planning.performance.search import estimate
from shared.tasks.specification import ModelShape
from tests.examples import examples

A100 = profile("a100-80")
STACK = stack(A100.stack)

shapes = st.builds(
    Shape,
    layers=st.sampled_from([12, 24, 48]),
    hidden=st.sampled_from([1024, 2048, 6144, 12288]),
    heads=st.sampled_from([16, 32]),
    sequence_length=st.sampled_from([512, 1024, 2048]),
    vocabulary=st.sampled_from([50257, 51200]),
)
layouts = st.builds(
    ParallelConfig,
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4, 6]),
    data=st.integers(1, 40),
    micro_batch=st.sampled_from([1, 2, 4]),
    interleave=st.just(1),
    recompute=st.sampled_from(RECOMPUTES),
    sequence_parallel=st.booleans(),
    distributed_optimizer=st.booleans(),
)
costly = settings(max_examples=examples(60), deadline=None)


@costly
@given(shapes, layouts)
def test_parts_are_not_negative_and_add_up(shape: Shape, layout: ParallelConfig) -> None:
    parts = iteration(shape, 256, layout, A100, STACK)
    assert min(parts) >= 0
    assert parts.compute_s > 0
    assert parts.iteration_s == sum(parts)


@costly
@given(
    shapes,
    layouts,
    st.sampled_from(["peak_flop_per_s", "memory_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s"]),
)
def test_better_hardware_is_never_slower(shape: Shape, layout: ParallelConfig, field: str) -> None:
    better = A100._replace(**{field: 2.0 * getattr(A100, field)})
    before = iteration(shape, 256, layout, A100, STACK).iteration_s
    assert iteration(shape, 256, layout, better, STACK).iteration_s <= before * (1 + 1e-12)


@costly
@given(shapes, layouts)
def test_no_faster_than_the_peak(shape: Shape, layout: ParallelConfig) -> None:
    seconds = iteration(shape, 256, layout, A100, STACK).iteration_s
    assert model_flop(shape, 256) / seconds / layout.workers < A100.peak_flop_per_s


@costly
@given(shapes, layouts)
def test_more_recomputation_takes_longer_and_less_memory(shape: Shape, layout: ParallelConfig) -> None:
    times, bytes_ = [], []
    for recompute in RECOMPUTES:
        found = estimate(shape, 256, layout._replace(recompute=recompute), A100, STACK)
        times.append(found.iteration_s)
        bytes_.append(found.memory.activations_bytes)
    assert times == sorted(times)
    assert bytes_ == sorted(bytes_, reverse=True)


@costly
@given(shapes, layouts)
def test_memory_grows_with_the_micro_batch_and_shrinks_with_tensor_parallelism(
    shape: Shape, layout: ParallelConfig
) -> None:
    def need(one: ParallelConfig) -> float:
        return estimate(shape, 4096, one, A100, STACK).memory.total_bytes

    assert need(layout._replace(micro_batch=2 * layout.micro_batch)) > need(layout)
    assert need(layout._replace(tensor=2 * layout.tensor)) < need(layout)


@costly
@given(shapes, layouts, st.integers(2, 64))
def test_distributed_optimizer_divides_its_state(shape: Shape, layout: ParallelConfig, data: int) -> None:
    counts = stage_layers(shape.layers, layout.pipeline, 1, 0.0, 0.0)
    whole = device_memory(shape, 256, layout._replace(data=data, distributed_optimizer=False), counts, A100, STACK)
    shared = device_memory(shape, 256, layout._replace(data=data, distributed_optimizer=True), counts, A100, STACK)
    assert (
        shared.optimizer_bytes * data == whole.optimizer_bytes
        or abs(shared.optimizer_bytes * data / whole.optimizer_bytes - 1) < 1e-12
    )
    assert shared.weights_bytes == whole.weights_bytes


@costly
@given(shapes, layouts)
def test_the_most_loaded_replica_counts(shape: Shape, layout: ParallelConfig) -> None:
    """12 micro-batches over 5 replicas take as long as over 4: three each at most."""
    base = layout._replace(micro_batch=1, distributed_optimizer=False)
    five = iteration(shape, 12, base._replace(data=5), A100, STACK)
    four = iteration(shape, 12, base._replace(data=4), A100, STACK)
    assert five.compute_s == four.compute_s


@costly
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000))
def test_products_take_at_least_the_roofline(m: int, n: int, k: int) -> None:
    flop_s = 2.0 * m * n * k / A100.peak_flop_per_s
    bytes_s = 2.0 * (m * k + k * n + m * n) / A100.memory_bytes_per_s
    assert product_s(m, n, k, 1, A100, STACK) > max(flop_s, bytes_s)


@costly
@given(st.floats(1e3, 1e10), st.integers(2, 2048), st.sampled_from([1, 2, 4, 8, 16]))
def test_collectives(size: float, workers: int, stride: int) -> None:
    group = Group(workers, stride)
    whole = all_reduce_s(size, group, A100, STACK)
    assert whole > all_reduce_s(size / 2, group, A100, STACK)
    assert half_s(size, group, A100, STACK) < whole
    assert all_reduce_s(size, Group(1, stride), A100, STACK) == 0.0


@pytest.mark.parametrize("interleave", [2, 4, 12])
def test_interleaving_hides_more_of_the_gradients(interleave: int) -> None:
    """Gradients of a chunk are final before the other chunks' last micro-batches are done."""
    hopper = profile("h100")
    shape = Shape(96, 18432, 96, 4096, 256000)
    plain = ParallelConfig(8, 8, 4, 1, 1, "none", True, True)
    before = iteration(shape, 64, plain, hopper, stack(hopper.stack))
    after = iteration(shape, 64, plain._replace(interleave=interleave), hopper, stack(hopper.stack))
    assert 0 < after.data_comm_s < before.data_comm_s


@pytest.mark.parametrize("distributed", [False, True])
def test_without_overlap_gradients_are_all_reduced_in_the_open(distributed: bool) -> None:
    shape, hardware = Shape(24, 6144, 32, 2048, 51200), profile("h100")
    layout = ParallelConfig(1, 1, 16, 1, distributed_optimizer=distributed, overlap=False)
    constants = stack(hardware.stack)
    assert constants.data_overlap > 0.0
    found = iteration(shape, 256, layout, hardware, constants)
    parameters = heaviest_parameters(shape, layout, (24,))
    expected = all_reduce_s(constants.gradient_bytes * parameters, Group(16, 1), hardware, constants)
    if distributed:
        expected += half_s(2.0 * parameters, Group(16, 1), hardware, constants)
    assert found.data_comm_s == expected
    beside = iteration(shape, 256, layout._replace(overlap=True), hardware, constants)
    assert beside.data_comm_s < expected
    assert beside._replace(data_comm_s=expected) == found


def test_predictions_take_no_transcendental_function() -> None:
    """Their last bit differs between C libraries; a plan must not (sums, products, quotients and roots do not)."""
    for path in sorted(Path(performance.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in {"log", "log2", "log10", "log1p", "exp", "expm1", "pow"}, (path.name, node.lineno)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                assert all(isinstance(side, ast.Constant) for side in (node.left, node.right)), path.name


def test_groups_across_nodes_use_the_cards_of_all_their_members() -> None:
    """8 members a node over 25 GB/s cards beat one member a node, and stay below NVLink."""
    inside, wide, narrow = (
        all_reduce_s(1e9, group, A100, STACK) for group in (Group(8, 1), Group(16, 1), Group(16, 8))
    )
    assert inside < wide < narrow


@costly
@given(st.integers(1, 130), st.integers(1, 64), st.floats(0, 3), st.floats(0, 3))
def test_stages_share_all_layers(layers: int, pipeline: int, first: float, last: float) -> None:
    pipeline = min(layers, pipeline)
    counts = stage_layers(layers, pipeline, 1, first, last)
    assert len(counts) == pipeline
    assert sum(counts) == layers
    if layers % pipeline == 0:
        assert len(set(counts)) == 1
        return
    loads = [float(count) for count in counts]
    loads[0] += first
    loads[-1] += last
    slowest = loads.index(max(loads))
    if counts[slowest] > 1:
        assert min(loads) + 1 >= max(loads) - 1e-9, "no layer could move from the slowest stage to another"


def test_flop_of_175b() -> None:
    """SC'21: 96 B s l h^2 (1 + s / 6h + v / 16 l h); and 72 without recomputation."""
    shape = Shape(96, 12288, 96, 2048, 51200)
    s, layers, h, v = 2048, 96, 12288, 51200
    expected = 96 * 1536 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert abs(hardware_flop(shape, 1536, "full") / expected - 1) < 1e-12
    model = ModelShape(layers=96, hidden=12288, heads=96, sequence_length=2048, vocabulary=51200)
    assert abs(model_flop(shape, 1) / model.flop_per_sample() - 1) < 1e-12


def test_every_number_of_a_profile_names_its_source() -> None:
    for name in names():
        described = {"peak_flop_per_s", "memory_bytes", "memory_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s"}
        assert described <= set(sources(name)), name
        stack(profile(name).stack)


def test_measured_numbers_replace_assumed_ones() -> None:
    faster = measured(profile("cpu"), peak_flop_per_s=1e11)
    shape = Shape(4, 128, 4, 64, 257)
    layout = ParallelConfig(1, 1, 1, 1)
    before = iteration(shape, 8, layout, profile("cpu"), stack("cpu")).iteration_s
    assert iteration(shape, 8, layout, faster, stack("cpu")).iteration_s < before
