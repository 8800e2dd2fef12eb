"""A text corpus generated from a small grammar: training data that needs no download.

    python -m unicron.trainer.corpus PATH [--seed N] [--bytes N]

Sentences follow a context-free grammar with number agreement and a few arithmetic facts, so that the loss of a small
byte-level model falls visibly within a hundred steps. The same seed and size give the same bytes on any machine.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from unicron.checkpoint import storage

DEFAULT_BYTES = 1_000_000
"""Size of the corpus. Chosen: some 8,000 samples of 128 bytes, so that a demo repeats the corpus only a few times."""

_SINGULAR = ("worker", "node", "agent", "engine", "river", "garden", "signal", "ledger", "planner", "train")
_ADJECTIVE = ("quiet", "broken", "healthy", "distant", "patient", "small", "golden", "slow")
_VERB = ("carries", "finds", "repairs", "follows", "watches", "counts", "moves", "keeps")
_ADVERB = ("again", "at dawn", "in order", "without haste", "every day", "at once")
_NUMBER = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _noun_phrase(rng: random.Random, plural: bool) -> str:
    adjective = rng.choice(_ADJECTIVE) + " " if rng.random() < 0.5 else ""
    noun = rng.choice(_SINGULAR)
    return f"the {adjective}{noun}s" if plural else f"{rng.choice(('the', 'a'))} {adjective}{noun}"


def _sentence(rng: random.Random) -> str:
    if rng.random() < 0.2:
        a = rng.randrange(6)
        b = rng.randrange(5)
        return f"{_NUMBER[a]} and {_NUMBER[b]} make {_NUMBER[a + b]}."
    plural = rng.random() < 0.4
    verb = rng.choice(_VERB)
    clause = f"{_noun_phrase(rng, plural)} {verb[:-1] if plural else verb} {_noun_phrase(rng, rng.random() < 0.3)}"
    return f"{clause} {rng.choice(_ADVERB)}." if rng.random() < 0.5 else f"{clause}."


def generate(seed: int = 1234, size_bytes: int = DEFAULT_BYTES) -> str:
    """Return a corpus of at least ``size_bytes`` ASCII characters; a blank line separates documents."""
    # With a str as seed, ``choice``, ``random`` and ``randrange`` are the same in all Python versions since 3.2.
    rng = random.Random(f"unicron corpus {seed}")  # nosec B311 # has to repeat itself
    documents: list[str] = []
    size = 0
    while size < size_bytes:
        document = " ".join(_sentence(rng) for _ in range(rng.randrange(4, 13)))
        documents.append(document)
        size += len(document) + 2
    return "\n\n".join(documents) + "\n"


def write(path: str | Path, seed: int = 1234, size_bytes: int = DEFAULT_BYTES) -> Path:
    """Write a corpus to a file and return the file's path; missing folders are made."""
    target = Path(path)
    storage.write_whole(str(target.absolute()), generate(seed, size_bytes).encode("ascii"))
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m unicron.trainer.corpus PATH [--seed N] [--bytes N]``; return the exit code."""
    parser = argparse.ArgumentParser(prog="unicron.trainer.corpus", description="Write a generated text to train on.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--bytes", type=int, default=DEFAULT_BYTES)
    options = parser.parse_args(arguments)
    write(options.path, options.seed, options.bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
