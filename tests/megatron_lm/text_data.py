"""Text for the scripts of T5 and BERT, which have no mock data: documents of drawn words, and a vocabulary."""

from __future__ import annotations

import sys
from pathlib import Path

WORDS, DOCUMENTS, SENTENCES, LENGTH = 58, 200, 4, 12


def write(folder: Path) -> list[str]:
    """Write both; return the arguments that name them."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    folder.mkdir(parents=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocabulary").write_text("\n".join([*special, *(f"w{number}" for number in range(WORDS))]) + "\n")
    drawn = numpy.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=DType.optimal_dtype(len(special) + WORDS))
    for _ in range(DOCUMENTS):
        for _ in range(SENTENCES):
            builder.add_item(torch.from_numpy(drawn.integers(len(special), len(special) + WORDS, LENGTH)))
        builder.end_document()
    builder.finalize(f"{folder}/text.idx")
    return [
        *("--data-path", f"{folder}/text", "--data-cache-path", f"{folder}/cache", "--split", "90,10,0"),
        *("--vocab-file", f"{folder}/vocabulary"),
        *("--tokenizer-type", "BertWordPieceLowerCase"),
    ]


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])))
