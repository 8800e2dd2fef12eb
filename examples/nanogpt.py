"""Train a GPT in a script like nanoGPT's; lines that Unicron needs are marked.

    python examples/nanogpt.py                                             # alone
    torchrun --nproc-per-node 2 examples/nanogpt.py                        # data parallel, without healing
    unicron submit examples/nanogpt.yaml                                   # on a cluster, healing

It has what such scripts have: tied weights, gradient accumulation, a warm-up and a cosine, weight decay for matrices
alone, clipping, and an evaluation every few steps. It learns its own text; ``text`` is where another one goes.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unicron  # +

STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 300, 8, 8
LAYERS, HIDDEN, HEADS, BLOCK, VOCABULARY = 2, 64, 4, 64, 128
LEARNING_RATE, LEAST_RATE, WARMUP_STEPS, CLIP = 3e-3, 3e-4, 20, 1.0
EVALUATE_EVERY, EVALUATION_BATCHES = 50, 16

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
text = torch.tensor([min(byte, VOCABULARY - 1) for byte in Path(__file__).read_bytes()])
data = {"train": text[: len(text) * 9 // 10], "validation": text[len(text) * 9 // 10 :]}


class Block(nn.Module):
    """One layer: attention, and a perceptron."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.projection = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.perceptron = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        batch, length, _ = x.shape
        heads = self.attention(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))
        changed: torch.Tensor = x + self.perceptron(self.norm2(x))
        return changed


class Gpt(nn.Module):
    """A GPT whose embedding and output layer have one weight."""

    def __init__(self) -> None:
        """Make the model."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(BLOCK, HIDDEN)
        self.layers, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.output.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        logits = self.output(self.norm(self.layers(x)))
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def build(tensor: int, pipeline: int) -> tuple[nn.Module, torch.optim.Optimizer]:  # + not in DistributedDataParallel
    """Return model and optimizer; a plain module is not split, so both sizes are 1."""
    torch.manual_seed(1337)
    model = Gpt().to(device)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def sample_ids(split: str, step: int, micro_batch: int) -> list[int]:
    """Return where a micro-batch's samples begin: drawn from step and number alone, so any process can compute it."""
    generator = torch.Generator().manual_seed(step * 1_000_003 + micro_batch)  # + in place of the process's own
    starts: list[int] = torch.randint(len(data[split]) - BLOCK, (MICRO_BATCH_SIZE,), generator=generator).tolist()
    return starts


def batch(split: str, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of samples."""
    rows = torch.stack([data[split][i : i + BLOCK + 1] for i in ids]).to(device)
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int) -> float:
    """Return the rate of a step: a warm-up, then a cosine."""
    if step <= WARMUP_STEPS:
        return LEARNING_RATE * step / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)
    return LEAST_RATE + 0.5 * (1.0 + math.cos(math.pi * done)) * (LEARNING_RATE - LEAST_RATE)


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """Return the mean loss over the same batches of each split each time; the ranks share the batches."""
    sums = torch.zeros(len(data), dtype=torch.float64, device=device)
    model.eval()
    for number, split in enumerate(data):
        for k in range(run.generation.rank, EVALUATION_BATCHES, run.generation.world_size):
            sums[number] += model(*batch(split, sample_ids(split, 0, k)))
    model.train()
    if run.generation.world_size > 1:
        dist.all_reduce(sums)
    return dict(zip(data, (sums / EVALUATION_BATCHES).tolist(), strict=True))


run = unicron.attach(steps=STEPS, micro_batches=MICRO_BATCHES, build=build, checkpoint_every=100)  # +
for step in run.steps():  # + in place of `while True`
    with step:  # +
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(step.number)
        for k in step.micro_batches():  # + in place of `for k in range(gradient_accumulation_steps)`
            ids = sample_ids("train", step.number, k)
            loss = run.model(*batch("train", ids))
            (loss / MICRO_BATCHES).backward()
            step.commit(k, loss, ids)  # +
        step.reduce()  # + in place of DistributedDataParallel's all-reduce
        norm = step.clip_gradients(CLIP)  # + in place of torch.nn.utils.clip_grad_norm_
        run.optimizer.step()
        run.log({"grad_norm": norm, "lr": learning_rate(step.number)})  # + in place of wandb.log
    if step.completed and step.number % EVALUATE_EVERY == 0:
        with run.boundary():  # + a fault inside brings the step back, with nothing to compute
            losses = evaluate(run.model)
            run.log({f"{k}_loss": v for k, v in losses.items()})  # +
            if run.generation.rank == 0:
                print(f"step {step.number}: {', '.join(f'{k} {v:.4f}' for k, v in losses.items())}", flush=True)
