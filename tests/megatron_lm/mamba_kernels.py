"""What stands for Mamba's kernels, which are compiled for CUDA alone.

It is the recurrence of the kernels' paper (Dao and Gu 2024, "Transformers are SSMs", equation 1) as plain torch:
slow, and differentiable by itself. For tests alone.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch.nn import functional


def scan(
    parts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    D: torch.Tensor,
    *,
    headdim: int,
    ngroups: int,
    **options: Any,
) -> torch.Tensor:
    """Stand for ``mamba_split_conv1d_scan_combined``: gate, convolution and recurrence.

    Args:
        parts: (batch, length, gate + inputs + two states for each group + a step for each head).
        weight: (channels, width) of the causal convolution.
        bias: (channels,).
        dt_bias: (heads,).
        a: (heads,), negative.
        D: (heads,), of what goes past the recurrence.
        headdim: channels of a head.
        ngroups: groups of heads that share their states' projections.
        options: what only concerns the kernels.

    Returns:
        (batch, length, heads * headdim).
    """
    heads = a.shape[0]
    inner = heads * headdim
    z, xbc, dt = torch.split(parts, [inner, weight.shape[0], heads], dim=-1)
    width = weight.shape[-1]
    mixed = functional.conv1d(functional.pad(xbc.mT, (width - 1, 0)), weight[:, None], bias, groups=weight.shape[0])
    states = (weight.shape[0] - inner) // (2 * ngroups)
    x, b, c = torch.split(functional.silu(mixed).mT, [inner, ngroups * states, ngroups * states], dim=-1)
    x = x.view(*x.shape[:2], heads, headdim).float()
    b, c = (
        one.view(*x.shape[:2], ngroups, states).repeat_interleave(heads // ngroups, dim=2).float() for one in (b, c)
    )  # (batch, length, heads, states)
    steps = functional.softplus(dt.float() + dt_bias)
    state, outputs = torch.zeros(*x.shape[:1], heads, headdim, states), []
    for at in range(x.shape[1]):
        grown = (steps[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        state = state * torch.exp(steps[:, at] * a)[..., None, None] + grown
        outputs.append((state * c[:, at, :, None]).sum(-1) + D[:, None] * x[:, at])
    return (torch.stack(outputs, 1).flatten(2) * functional.silu(z.float())).to(parts.dtype)


class RMSNorm(torch.nn.Module):
    """Stands for the gated RMS norm, which gets no gate here, in groups."""

    def __init__(self, size: int, *, eps: float, group_size: int, device: Any, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what was normalised."""
        groups = x.float().view(*x.shape[:-1], -1, self.group_size)
        normal = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        found: torch.Tensor = normal.flatten(-2) * self.weight
        return found.to(x.dtype)


def install() -> None:
    """Put the stand-ins where megatron-core imports the kernels from."""
    contents: dict[str, dict[str, Any]] = {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_split_conv1d_scan_combined": scan,
            "mamba_chunk_scan_combined": None,
        },
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
