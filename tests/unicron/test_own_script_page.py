"""The script of docs/own-script.md runs as it is there, and the page is short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unicron.zygote import ROOT, zygote

PAGE = (ROOT / "docs" / "own-script.md").read_text()

MOST_WORDS = 600

YOURS = """
import torch
from torch.nn import functional as F

BLOCK, BATCH, M, STEPS, LEARNING_RATE, device = 8, 2, 2, 100, 1e-3, "cpu"
data = torch.arange(1000) % 7


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 8)
        self.output = torch.nn.Linear(8, 7, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, inputs, targets):
        return F.cross_entropy(self.output(torch.tanh(self.tokens(inputs))).flatten(0, 1), targets.flatten())


def batch(ids):
    rows = torch.stack([data[i : i + BLOCK + 1] for i in ids])
    return rows[:, :-1], rows[:, 1:]


def get_lr(step):
    return LEARNING_RATE * min(1.0, step / 10)


@torch.no_grad()
def estimate_loss(model):
    return model(*batch(sample_ids(0, 0))).item()
"""
"""What the page says is the reader's own."""


def test_the_script_of_the_page_trains(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(YOURS + found[1])
    zygote().run([str(script)], tmp_path)
    assert "step 100: " in (tmp_path / "output").read_text()


def test_the_page_can_be_read_at_once() -> None:
    assert len(PAGE.split()) <= MOST_WORDS
