"""The task specification as a training process reads it: a JSON file, which the api has made of the user's document.

The api validates the document when the task is submitted. This module checks only what a file needs to be read, because
a process without an agent may be given any file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unicron.errors import InvalidSpec
from unicron.gradients.precision import Precision
from unicron.protocol import environment
from unicron.snapshot.interval import Every

OWN_LOOP, MEGATRON_LM, BRIDGE, RESTART = "unicron", "megatron-lm", "megatron-bridge", "restart"
"""Whose loop a script runs: one on this library, Megatron-LM's or megatron-bridge's ``pretrain``, or another, which
restarts whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The fields of a task specification that a training process needs; they mean what they mean in the document."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence_length: int
    vocabulary: int
    qk_layernorm: bool
    """Whether queries and keys are normalised in each attention head."""
    global_batch: int
    """Samples in one update."""
    micro_batch: int
    """Samples in one forward pass; the same for the task's life."""
    steps: int
    data: str
    optimizer: str
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: float
    checkpoint_directory: str
    """Where checkpoints are written: a directory or an fsspec URL; empty: the generation's own directory."""
    checkpoint_every: int
    checkpoint_keep: int
    """How many published checkpoints are kept."""
    memory_every: Every
    """Steps between snapshots; 0: none; ``auto``: as often as they are worth (``unicron.snapshot.interval``)."""
    tensor: int
    pipeline: int
    interleave: int
    """Model chunks of each rank, where there are several pipeline stages."""
    distributed_optimizer: bool
    """Whether data-parallel ranks divide the optimizer's state among them."""
    sequence_parallel: bool
    """Whether tensor-parallel ranks divide the sequence where they do not divide the layer; with one rank, nothing."""
    recompute: str
    """Activations that are computed again in the backward pass: ``none``, ``selective`` or ``full``."""
    bf16: bool
    """Whether parameters and activations are bfloat16; gradients, and the optimizer's own parameters, are float32."""
    overlap: bool
    """Whether data-parallel ranks communicate beside backward and forward passes, with a divided optimizer."""
    seed: int
    order_samples: int
    """Samples from whose number the order of all samples is drawn; 0: those of this specification's steps."""
    dropout: float
    exact: bool
    """Whether the result is the same to the last bit, whatever fails and however many replicas there are."""
    deterministic_sums: bool
    """Whether gradients are added up in float64, so that the result is in practice the same."""
    script: str
    """A user's Python file that is run instead of the built-in trainer; empty: none."""
    arguments: tuple[str, ...] = ()
    """The script's arguments."""
    module: str = ""
    """The module that the script is the file of; empty: it is run as a file."""
    loop: str = OWN_LOOP
    """Whose loop the script runs: ``OWN_LOOP``, ``MEGATRON_LM``, ``BRIDGE`` or ``RESTART``."""
    python: str = ""
    """The interpreter of a script that restarts whole; empty: this process's own."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one update."""
        return self.global_batch // self.micro_batch

    @property
    def order(self) -> int:
        """Samples from whose number the order of all samples is drawn."""
        return self.order_samples or self.steps * self.global_batch

    @property
    def precision(self) -> Precision:
        """The precision of the sums of gradients."""
        return Precision.of_task(exact=self.exact, deterministic_sums=self.deterministic_sums)

    def check_script(self, *, steps: int, micro_batches: int) -> None:
        """Check that a script trains as the specification describes, on which the planner relies.

        Args:
            steps: updates that the script applies.
            micro_batches: the number in one update of the script.

        Raises:
            InvalidSpec: the script and the specification differ.
        """
        if steps != self.steps:
            raise InvalidSpec(f"steps: the script trains {steps}, the task's specification says {self.steps}")
        if micro_batches != self.micro_batches:
            raise InvalidSpec(
                f"micro_batches: the script's update has {micro_batches}, the task's specification says "
                f"{self.micro_batches} (batch.global {self.global_batch} / batch.micro {self.micro_batch})"
            )


def parse(data: Mapping[str, Any]) -> Spec:
    """Return the specification in a decoded JSON document; the defaults are those of the submitted document.

    Raises:
        InvalidSpec: a required field is missing or has the wrong type.
    """
    try:
        model, batch = data["model"], data["batch"]
        optimizer = data.get("optimizer") or {}
        checkpoint = data.get("checkpoint") or {}
        parallel = data.get("parallel") or {}
        sizes = {k: 1 if parallel.get(k, "auto") == "auto" else int(parallel[k]) for k in ("tensor", "pipeline")}
        return Spec(
            name=str(data["name"]),
            layers=int(model["layers"]),
            hidden=int(model["hidden"]),
            heads=int(model["heads"]),
            sequence_length=int(model["sequence_length"]),
            vocabulary=int(model.get("vocabulary", 257)),
            qk_layernorm=bool(model.get("qk_layernorm", False)),
            global_batch=int(batch["global"]),
            micro_batch=int(batch.get("micro", 1)),
            steps=int(data["steps"]),
            data=str(data["data"]),
            optimizer=str(optimizer.get("name", "adam")),
            lr=float(optimizer.get("lr", 1e-3)),
            weight_decay=float(optimizer.get("weight_decay", 0.01)),
            beta1=float(optimizer.get("beta1", 0.9)),
            beta2=float(optimizer.get("beta2", 0.95)),
            eps=float(optimizer.get("eps", 1e-8)),
            clip=float(optimizer.get("clip", 1.0)),
            checkpoint_directory=str(checkpoint.get("url") or checkpoint.get("directory") or ""),
            checkpoint_every=int(checkpoint.get("every", 50)),
            checkpoint_keep=int(checkpoint.get("keep", 2)),
            memory_every=_every(checkpoint.get("memory_every", "auto")),
            tensor=sizes["tensor"],
            pipeline=sizes["pipeline"],
            interleave=int(parallel.get("interleave", 1)),
            distributed_optimizer=bool(parallel.get("distributed_optimizer", False)),
            sequence_parallel=bool(parallel.get("sequence_parallel", False)),
            recompute=str(parallel.get("recompute", "none")),
            bf16=bool(data.get("bf16", False)),
            overlap=bool(parallel.get("overlap", False)),
            seed=int(data.get("seed", 1234)),
            order_samples=int(data.get("order_samples") or 0),
            dropout=float(data.get("dropout", 0.0)),
            exact=bool(data.get("exact", False)),
            deterministic_sums=bool(data.get("deterministic_sums", False)),
            script=str(data.get("script") or ""),
            arguments=tuple(map(str, data.get("arguments") or ())),
            module=str(data.get("module") or ""),
            loop=str(data.get("loop") or OWN_LOOP),
            python=str(data.get("python") or ""),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise InvalidSpec(f"task specification: {type(err).__name__}: {err}") from err


def _every(value: Any) -> Every:
    return "auto" if value == "auto" else int(value)


def of_environment() -> Spec | None:
    """Return the specification that the environment names (``environment.SPEC``); None if it names none.

    Raises:
        InvalidSpec: the file cannot be read, is not JSON or lacks a field.
    """
    path = environment.text(environment.SPEC)
    return load(path) if path else None


def load(path: str | Path) -> Spec:
    """Return the specification in a JSON file.

    Raises:
        InvalidSpec: the file cannot be read, is not JSON or lacks a field.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise InvalidSpec(f"task specification {path}: {err}") from err
    if not isinstance(data, dict):
        raise InvalidSpec(f"task specification {path}: a JSON object is needed, not {type(data).__name__}")
    found = parse(data)
    return replace(found, script=environment.placed(found.script), data=environment.placed(found.data))
