"""A script that ``srun unicron run`` runs on several nodes, and what it prints."""

from __future__ import annotations

import re

import torch

STEPS, MICRO_BATCHES = 300, 6
"""As many micro-batches as two workers and three can share."""

SCRIPT = f"""
import os, time
import torch
import unicron

def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)

run = unicron.attach(steps={STEPS}, micro_batches={MICRO_BATCHES}, build=build, checkpoint_every=1000)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            if os.path.exists("slow"):
                time.sleep(0.1)
            loss = run.model(torch.ones(2, 8)).square().mean()
            torch.autograd.backward(loss / {MICRO_BATCHES})
            step.commit(k, loss, [k])
        step.reduce()
        run.optimizer.step()
    if step.completed and run.generation.rank == 0:
        weights = sum(float(p.detach().sum()) for p in run.model.parameters())
        print("step", step.number, f"weights {{weights:.8f}}", flush=True)
"""
"""Slow as long as a file exists."""

REST = {
    "model": {"layers": 1, "hidden": 8, "heads": 1, "sequence_length": 1},
    "batch": {"global": 2 * MICRO_BATCHES, "micro": 2},
    "steps": STEPS,
}


def step_lines(output: str) -> list[int]:
    """Return the steps that were printed as done."""
    return [int(step) for step in re.findall(r"\| step (\d+) ", output)]


def weights_after(output: str | None = None) -> float:
    """Return the sum of the weights behind the last step: as printed; without ``output`` as plain PyTorch has it."""
    if output is not None:
        return float(re.findall(rf"\| step {STEPS} weights (\S+)", output)[-1])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.ones(2, 8)).square().mean())
        optimizer.step()
    return sum(float(p.detach().sum()) for p in model.parameters())
