"""Samples are the same for everyone; a text is tokenised once."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from unicron.accounting import EMPTY_DIGEST, chain_digest
from unicron.errors import InvalidSpec, NonFiniteValue
from unicron.state.rank_state import RankState
from unicron.trainer import corpus, spec
from unicron.trainer.data import END_OF_DOCUMENT, Samples, dataset_prefix

pytestmark = pytest.mark.usefixtures("megatron")


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
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".bin", ".idx"]


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
    rank_state.begin(1, [0, 1], 1)
    with pytest.raises(NonFiniteValue, match="micro-batch 1 of step 1"):
        rank_state.commit({1: float("nan")}, {1: [5]})
    assert rank_state.partial is not None
    assert not rank_state.partial.samples
