"""A GPT model as numbers: parameters of its layers and embeddings on one worker, and FLOP of an update.

Symbols as in Narayanan et al. (SC'21) and Korthikanti et al. (MLSys'23): B sequences of an update, s sequence
length, h hidden size, l layers (``n`` in code), v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.tasks.specification import ModelShape


class Shape(NamedTuple):
    """The five sizes of a GPT model, as a hashable key of caches."""

    layers: int
    hidden: int
    heads: int
    sequence_length: int
    vocabulary: int

    @classmethod
    def of(cls, model: ModelShape) -> Shape:
        """Return the sizes of a task's model."""
        return cls(model.layers, model.hidden, model.heads, model.sequence_length, model.vocabulary)


def layer_parameters(shape: Shape, tensor: int) -> float:
    """Return the parameters of one layer on one worker.

    12 h^2 / t of matrices, 7 h / t of biases that are split, and 6 h of norms and biases that are not.
    """
    h = shape.hidden
    return (12.0 * h * h + 7.0 * h) / tensor + 6.0 * h


def word_parameters(shape: Shape, tensor: int) -> float:
    """Return the parameters of the word embedding on one worker, v h / t. The logits use the same weights."""
    return shape.vocabulary * shape.hidden / tensor


def position_parameters(shape: Shape) -> float:
    """Return the parameters of the learned position embedding, s h, on every worker of the first stage."""
    return float(shape.sequence_length * shape.hidden)


def model_flop(shape: Shape, samples: int) -> float:
    """Return the model FLOP of one update on ``samples`` sequences, without recomputation.

    72 B s l h^2 (1 + s/(6h) + v/(12lh)): SC'21, appendix, and Korthikanti et al., equation 7.
    """
    s, h, n, v = shape.sequence_length, shape.hidden, shape.layers, shape.vocabulary
    return 72.0 * samples * s * n * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * n * h))


def hardware_flop(shape: Shape, samples: int, recompute: str) -> float:
    """Return the FLOP that the hardware executes for one update, with recomputation.

    ``full``: 96 B s l h^2 (1 + s/(6h) + v/(16lh)), SC'21, equation 3: one more forward pass of the layers.
    ``selective``: one more forward pass of the attention core, Korthikanti et al., equation 8.
    """
    s, h, n = shape.sequence_length, shape.hidden, shape.layers
    extra = {
        "none": 0.0,
        "selective": 4.0 * samples * s * s * h * n,
        "full": 24.0 * samples * s * n * h * h * (1.0 + s / (6.0 * h)),
    }[recompute]
    return model_flop(shape, samples) + extra
