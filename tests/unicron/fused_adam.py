"""Stands for Transformer Engine's FusedAdam, which needs a device: what Megatron's precision-aware optimizer uses.

It keeps what that one keeps, under the same names: in ``state`` the two moments, in the types that are asked for, and
``master_param``, in float32 or as the 16 bits of precision that a bfloat16 parameter lacks; beside it ``_scales``, of
each state that is not float32; and the count of steps in the group.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam with a state of other types than the parameters and gradients."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        """Prepare the optimizer."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert adam_w_mode
        assert master_weights == use_decoupled_grad
        assert master_weight_dtype is torch.float32
        self._types = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self._decoupled, self._remainders = use_decoupled_grad, store_param_remainders
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def initialize_state(self, parameter: torch.Tensor) -> None:
        """Make the state of a parameter."""
        state = self.state[parameter]
        for name, dtype in self._types.items():
            state[name] = torch.zeros_like(parameter, dtype=dtype)
            if dtype is not torch.float32:
                self._scales.setdefault(parameter, {})[name] = torch.ones(1)
        if self._decoupled:
            remainders = self._remainders and parameter.dtype is torch.bfloat16
            state["master_param"] = (
                torch.zeros_like(parameter, dtype=torch.int16) if remainders else parameter.detach().float().clone()
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply an update."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                gradient = parameter.decoupled_grad if self._decoupled else parameter.grad
                if gradient is not None:
                    self._update(parameter, gradient.float(), group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), count = self.state[parameter], group["betas"], group["step"]
        found = {}
        for name in self._types:
            found[name] = state[name].float()
            if state[name].dtype is not torch.float32:
                assert self._scales[parameter][name] == 1.0
        first = found["exp_avg"].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        second = found["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        for name, value in found.items():
            state[name].copy_(value)
        main = self._main(parameter)
        step = first / (1.0 - beta1**count) / ((second / (1.0 - beta2**count)).sqrt() + group["eps"])
        main -= group["lr"] * (step + group["weight_decay"] * main)
        self._keep(parameter, main)

    def _main(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter in float32."""
        kept = self.state[parameter].get("master_param")
        if kept is None or kept.dtype is not torch.int16:
            return parameter if kept is None else kept
        # The parameter was rounded up where the rest is negative.
        high = parameter.view(torch.int16).to(torch.int32) - (kept < 0).to(torch.int32)
        found: torch.Tensor = ((high << 16) | (kept.to(torch.int32) & 0xFFFF)).view(torch.float32)
        return found

    def _keep(self, parameter: torch.Tensor, main: torch.Tensor) -> None:
        kept = self.state[parameter].get("master_param")
        if kept is None or kept.dtype is not torch.int16:
            parameter.copy_(main)
            return
        bits = main.view(torch.int32)
        kept.copy_(((bits & 0xFFFF) ^ 0x8000) - 0x8000)
        parameter.view(torch.int16).copy_((bits >> 16) + (kept < 0).to(torch.int32))


def enable() -> None:
    """Have Megatron, once it is imported, find this in the place of Transformer Engine's."""
    import megatron.core.optimizer as optimizers

    megatron: Any = optimizers
    megatron.distrib_optimizer.HAVE_APEX_OR_TE, megatron.distrib_optimizer.Adam = True, FusedAdam
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        module: Any = sys.modules.setdefault(name, types.ModuleType(name))
        module.__version__, module.FusedAdam = "2.9.0", FusedAdam
    megatron.Adam, megatron.USING_PYTORCH_OPTIMIZER = FusedAdam, False
