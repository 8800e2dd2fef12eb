"""Samples are the same for everyone; a text is tokenised once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import unicron
from tests.unicron.conftest import MODEL
from unicron.accounting import EMPTY_DIGEST, chain_digest
from unicron.checkpoint import archive, reader
from unicron.errors import InvalidSpec, NonFiniteValue
from unicron.protocol import environment
from unicron.state.rank_state import RankState
from unicron.trainer import corpus, spec
from unicron.trainer.data import END_OF_DOCUMENT, Samples, dataset_prefix, permuted

pytestmark = pytest.mark.usefixtures("megatron")

PERMUTED = [9, 8, 5, 0, 6, 1, 2, 7, 3, 4]
"""Of ten samples, with seed 7, in the first epoch: the order of a task may never change."""


def task(text: Path, **fields: object) -> spec.Spec:
    """A specification over a text."""
    return spec.parse(
        {
            "name": "a",
            "model": {"layers": 1, "hidden": 8, "heads": 1, "sequence_length": 16},
            "batch": {"global": 8, "micro": 2},
            "steps": 5,
            "data": str(text),
        }
        | fields
    )


def test_the_corpus_is_the_same_everywhere() -> None:
    text = corpus.generate(seed=7, size_bytes=2_000)
    assert text == corpus.generate(seed=7, size_bytes=2_000) != corpus.generate(seed=8, size_bytes=2_000)
    assert len(text) >= 2_000
    assert hashlib.sha256(text.encode()).hexdigest().startswith("78160f5f5a88b4ec")


def test_a_text_is_tokenised_once_by_many_at_once(tmp_path: Path, text: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        prefixes = set(pool.map(lambda _: dataset_prefix(str(text), tmp_path), range(8)))
    assert len(prefixes) == 1
    assert sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file()) == ["", ".bin", ".idx"]


def read(text: Path, cache: Path) -> list[tuple[int, ...]]:
    """Return the tokens of all samples of a task over a text."""
    return tokens(Samples(task(text), cache), range(1, 6))


def files_of(cache: Path) -> list[Path]:
    """Return the files of a cache."""
    return sorted(path for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def cut_and_die(path: str) -> None:
    """Leave half of a file, and end as by the kernel's hand."""
    os.truncate(path, os.path.getsize(path) // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def open_and_die_at(text: Path, cache: Path, kind: str) -> None:
    """Open the samples; the process is killed when the first file of a kind is half written."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    save, finalize = np.save, IndexedDatasetBuilder.finalize

    def save_half(path: str, *arguments: Any, **options: Any) -> None:
        save(path, *arguments, **options)
        if path.endswith(kind):
            cut_and_die(path)

    def finalize_half(builder: Any, path: str) -> None:
        finalize(builder, path)
        if kind == ".idx":
            cut_and_die(path)

    with patch.object(np, "save", save_half), patch.object(IndexedDatasetBuilder, "finalize", finalize_half):
        Samples(task(text), cache)


@pytest.mark.parametrize("kind", [".idx", "document_index.npy", "sample_index.npy", "shuffle_index.npy"])
def test_what_a_killed_process_has_half_written_is_read_by_nobody(kind: str, tmp_path: Path, text: Path) -> None:
    expected = read(text, tmp_path / "whole")
    cache = tmp_path / "cache"
    process = multiprocessing.get_context("fork").Process(target=open_and_die_at, args=(text, cache, kind))
    process.start()  # a fork, which has loaded megatron-core
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert read(text, cache) == expected
    assert len(files_of(cache)) == len(files_of(tmp_path / "whole")), "nothing is left of the killed process"


@pytest.mark.parametrize("part", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("which", ["document_index", "sample_index", "shuffle_index"])
def test_an_index_that_cannot_be_read_is_made_anew(which: str, part: float, tmp_path: Path, text: Path) -> None:
    expected = read(text, tmp_path)
    (path,) = [path for path in files_of(tmp_path) if which in path.name]
    size = path.stat().st_size
    os.truncate(path, int(size * part))
    assert read(text, tmp_path) == expected
    assert path.stat().st_size == size


def test_data_that_has_changed_has_an_index_of_its_own(tmp_path: Path, text: Path) -> None:
    """Megatron-core names its index by the path of the data alone."""
    prefix = dataset_prefix(str(text), tmp_path / "a")
    data = tmp_path / "data"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prefix}{suffix}", f"{data}{suffix}")
    before = read(data, tmp_path / "cache")
    (tmp_path / "other").write_text(corpus.generate(seed=9, size_bytes=3_000))
    prefix = dataset_prefix(str(tmp_path / "other"), tmp_path / "b")
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prefix}{suffix}", f"{data}{suffix}")
    after = read(data, tmp_path / "cache")
    assert after != before
    assert after == read(data, tmp_path / "fresh")


def test_tokens_are_the_bytes_of_documents_with_an_end(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"ab\n\ncd")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(dataset_prefix(str(tmp_path / "text"), tmp_path / "cache")))
    assert [list(dataset[i]) for i in range(len(dataset))] == [[97, 98, END_OF_DOCUMENT], [99, 100, END_OF_DOCUMENT]]


def test_every_step_takes_the_next_block_of_samples(tmp_path: Path, text: Path) -> None:
    samples = Samples(task(text), tmp_path)
    ids = [i for step in range(1, 6) for k in range(4) for i in samples.ids(step, k)]
    assert ids == list(range(40))
    batch = samples.batch([3, 4])
    again = Samples(task(text), tmp_path).batch([3, 4])
    assert batch["tokens"].shape == (2, 16)
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert all(torch.equal(batch[k], again[k]) for k in batch)


@pytest.mark.parametrize("data", ["missing", "empty"])
def test_unusable_data_is_refused(tmp_path: Path, data: str) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(InvalidSpec, match=data):
        Samples(task(tmp_path / data), tmp_path / "cache")


def test_the_digest_depends_on_order() -> None:
    assert chain_digest(chain_digest(EMPTY_DIGEST, [1, 2]), [3]) != chain_digest(
        chain_digest(EMPTY_DIGEST, [2, 1]), [3]
    )


def test_a_loss_that_is_no_number_is_refused_before_it_counts() -> None:
    model = torch.nn.Linear(2, 1)
    rank_state = RankState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank_state.set_version(0, EMPTY_DIGEST)
    rank_state.begin(1, [0, 1], 1, micro_batches=2)
    with pytest.raises(NonFiniteValue, match="micro-batch 1 of step 1"):
        rank_state.commit({1: float("nan")}, {1: [5]})
    assert rank_state.partial is not None
    assert not rank_state.partial.samples


def tokens(samples: Samples, steps: range) -> list[tuple[int, ...]]:
    """Return the tokens of all samples of these steps, in order."""
    ids = [i for step in steps for k in range(4) for i in samples.ids(step, k)]
    return [tuple(row) for i in ids for row in samples.batch([i])["tokens"].tolist()]


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """A text of one document, no two samples of which are equal."""
    path = tmp_path / "numbered"
    path.write_text(" ".join(f"{number:06d}" for number in range(80)))
    return path


def test_more_steps_change_none_of_the_steps_before(tmp_path: Path, numbered: Path) -> None:
    """A task that goes on with other steps keeps the order that was drawn from the number of the first start."""
    planned = tokens(Samples(task(numbered), tmp_path), range(1, 6))
    longer = Samples(task(numbered, steps=60, order_samples=40), tmp_path)
    assert tokens(longer, range(1, 6)) == planned
    longest = Samples(task(numbered, steps=90, order_samples=40), tmp_path)
    assert tokens(longest, range(1, 61)) == tokens(longer, range(1, 61))
    shorter = Samples(task(numbered, steps=3, order_samples=40), tmp_path)
    assert tokens(shorter, range(1, 4)) == planned[:24]


def test_a_longer_run_appends_whole_epochs(tmp_path: Path, numbered: Path) -> None:
    """560 tokens are 34 samples of 16 tokens: a first epoch of the order that was drawn, and others behind it."""
    drawn = task(numbered, steps=4, batch={"global": 8, "micro": 2})
    epoch = 34
    longer = Samples(task(numbered, steps=17, order_samples=drawn.order), tmp_path)
    found = tokens(longer, range(1, 18))
    assert len(found) == 4 * epoch
    epochs = [found[begin : begin + epoch] for begin in range(0, len(found), epoch)]
    assert [len(set(one)) for one in epochs] == [epoch] * 4
    assert len({tuple(one) for one in epochs}) == 4, "each epoch has an order of its own"


def test_the_order_of_a_checkpoint_is_that_of_the_run_which_goes_on_from_it(tmp_path: Path, numbered: Path) -> None:
    planned = tokens(Samples(task(numbered), tmp_path), range(1, 6))
    longer = Samples(task(numbered, steps=60), tmp_path, recorded=40)
    assert (longer.drawn, tokens(longer, range(1, 6))) == (40, planned)
    with pytest.raises(InvalidSpec, match=r"order_samples: 48.*the checkpoint's order was drawn from 40"):
        Samples(task(numbered, order_samples=48), tmp_path, recorded=40)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 257, 1000])
def test_a_permutation_is_one_and_differs_by_seed_and_epoch(size: int) -> None:
    orders = {key: [permuted(i, size, *key) for i in range(size)] for key in ((7, 0), (7, 1), (8, 0))}
    assert all(sorted(order) == list(range(size)) for order in orders.values())
    if size >= 10:
        assert len({tuple(order) for order in orders.values()}) == 3
    assert [permuted(i, 10, 7, 0) for i in range(10)] == PERMUTED, "of every version and machine"


def test_a_script_draws_its_order_from_the_number_of_the_first_start(
    tmp_path: Path, numbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unicron.order_samples(480) == 480
    path = tmp_path / "spec.json"
    monkeypatch.setenv(environment.SPEC, str(path))
    fields = {"name": "a", "model": MODEL, "batch": {"global": 8}, "steps": 60, "data": str(numbered)}
    for order, expected in ((None, 480), (40, 40)):
        path.write_text(json.dumps(fields | {"order_samples": order}))
        assert unicron.order_samples(480) == expected


def test_a_checkpoint_says_from_how_many_samples_the_order_was_drawn(tmp_path: Path) -> None:
    for step, order in ((1, 0), (2, 40)):
        location = str(tmp_path / f"step-{step}")
        archive.publish(location, archive.Manifest(step=step, digest="ab", files={}, order_samples=order))
        assert reader.order_samples(location) == order
    assert "order_samples" not in (tmp_path / "step-1" / archive.MANIFEST).read_text(), "as of earlier versions"
    assert reader.order_samples(str(tmp_path / "step-3")) == 40, "the newest other one is read in its place"
