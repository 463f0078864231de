"""Adam with moments of the mean of several gradients (Wang et al. 2024, arXiv 2410.11998)."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class AccumAdam(Optimizer):
    """AccumAdam, or AccumAdamW with `decoupled` weight decay.

    The moments m and v stay fixed for K = `accum_iter` steps, while each step looks ahead with its
    own gradient. In step t = 1, 2, ... with gradient g (plus weight_decay * w, or w first times
    1 - lr * weight_decay if `decoupled`), and with n = ceil(t / K):

        m' = b1 * m + (1 - b1) * g
        v' = b2 * v + (1 - b2) * g^2
        w  = w - lr * (m' / (1 - b1^n)) / (sqrt(v' / (1 - b2^n)) + eps)

    and after every K-th step, with h the mean of the last K gradients,

        m  = b1 * m + (1 - b1) * h
        v  = b2 * v + (1 - b2) * h^2

    K = 1 gives Adam. The weights change in every step, unlike with gradient accumulation.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
        decoupled: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "accum_iter": accum_iter,
            "decoupled": decoupled,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; gradients stay unchanged."""
        for group in self.param_groups:
            parameters_by_step: defaultdict[int, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state |= _fresh_state(parameter)
                    state["step"] += 1
                    parameters_by_step[state["step"]].append(parameter)
            for step, parameters in parameters_by_step.items():
                self._update(parameters, step, group)

    def _update(self, parameters: list[Tensor], step: int, group: dict[str, Any]) -> None:
        lr, accum_iter, (beta1, beta2) = group["lr"], group["accum_iter"], group["betas"]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        first, second, mean = (
            [self.state[parameter][key] for parameter in parameters]
            for key in ("exp_avg", "exp_avg_sq", "mean_grad")
        )
        if group["weight_decay"]:
            if group["decoupled"]:
                torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            else:
                grads = [*torch._foreach_add(grads, parameters, alpha=group["weight_decay"])]
        torch._foreach_add_(mean, grads, alpha=1 / accum_iter)
        updates = math.ceil(step / accum_iter)
        ahead = [moment.clone() for moment in first]
        torch._foreach_lerp_(ahead, grads, 1 - beta1)  # in place: torch 2.11 shards no other form
        root = torch._foreach_mul(second, beta2)
        torch._foreach_addcmul_(root, grads, grads, value=1 - beta2)
        torch._foreach_sqrt_(root)
        torch._foreach_div_(root, math.sqrt(1 - beta2**updates))
        torch._foreach_add_(root, group["eps"])
        torch._foreach_addcdiv_(parameters, ahead, root, value=-lr / (1 - beta1**updates))
        if step % accum_iter == 0:
            torch._foreach_lerp_(first, mean, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, mean, mean, value=1 - beta2)
            torch._foreach_zero_(mean)


def _fresh_state(parameter: Tensor) -> dict[str, int | Tensor]:
    tensors = {
        key: torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for key in ("exp_avg", "exp_avg_sq", "mean_grad")
    }
    return {"step": 0, **tensors}
