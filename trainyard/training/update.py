"""Applies gradients: unscale, check for non-finite values, clip, optimizer step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainyard.averaging.sharded import gathered

Clip = Callable[[Sequence[nn.Parameter], Tensor], None]
"""Clips the gradients of parameters in place, given the norm of the whole gradient."""
ReadyParameters = Callable[[int, bool], Iterable[Sequence[nn.Parameter]]]
"""See Averager.ready_parameters."""


class Updated(NamedTuple):
    grad_norm: Tensor
    skipped: Tensor


class Update:
    """An optimizer's update, skipped where the gradient is not finite.

    Torch's fused kernels skip on the device. For other optimizers the host waits for the check.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: "LossScale",
        *,
        clip: Clip,
    ) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer, self._scale, self._clip = optimizer, scale, clip
        self._can_skip = getattr(optimizer, "_step_supports_amp_scaling", False)

    @property
    def loss_scale(self) -> Tensor:
        return self._scale.value

    def forget(self) -> None:
        """Drops the gradient."""
        self._optimizer.zero_grad()

    @torch.no_grad()
    def __call__(self, step: int, ready: ReadyParameters | None = None) -> Updated:
        """Updates the parameters as they become `ready`; without it, all of them."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        self._scale.unscale(grads)
        norm = gathered(get_total_norm(grads))
        finite = norm.isfinite()
        # Optimizers that can skip are fused; these can update the parameters in several groups.
        for group in ready(step, self._can_skip) if ready else [self._parameters]:
            parameters = [p for p in group if p.grad is not None]
            self._clip(parameters, norm)
            is_all = len(group) == len(self._parameters)
            with nullcontext() if is_all else _only(self._optimizer, parameters):
                self._step(finite)
        self._optimizer.zero_grad()
        self._scale.adjust(finite)
        return Updated(norm, (~finite).float())

    def _step(self, finite: Tensor) -> None:
        optimizer: Any = self._optimizer
        if self._can_skip:
            optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()
            optimizer.step()
        elif finite:  # waits for the device
            optimizer.step()


class LossScale:
    """A constant loss scale of 1, for fp32, tf32 and bf16."""

    def __init__(self, device: torch.device, initial: float = 1.0) -> None:
        self.value = torch.full((), initial, device=device)

    def unscale(self, grads: list[Tensor]) -> None:
        """Divides gradients by the scale, in place."""

    def adjust(self, finite: Tensor) -> None:
        """Adapts the scale after an update, which was skipped unless its gradient was finite."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class DynamicLossScale(LossScale):
    """The loss scale for fp16: halves when a gradient overflows, doubles after many that do not.

    Like torch.amp.GradScaler, but the scale stays finite, and `Update` skips at any precision.
    Ranks of equal weights skip the same updates, so their scales are equal; a replica has its own.
    """

    def __init__(self, device: torch.device, initial: float = 2.0**16, interval: int = 2000):
        super().__init__(device, initial)
        self._interval = interval
        self._good = torch.zeros((), device=device)  # updates since the scale last changed

    def unscale(self, grads: list[Tensor]) -> None:
        torch._foreach_mul_(grads, self.value.reciprocal())

    def adjust(self, finite: Tensor) -> None:
        self._good = torch.where(finite, self._good + 1, 0)
        grows = self._good >= self._interval
        grown = self.value * (1 + grows)
        grown = torch.where(grown.isfinite(), grown, self.value)
        self.value = torch.where(finite, grown, self.value / 2)
        self._good = torch.where(grows, 0, self._good)

    def state_dict(self) -> dict[str, Any]:
        return {"value": float(self.value), "good": float(self._good)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.fill_(state["value"])
        self._good.fill_(state["good"])


# --- clipping ---


def no_clip(parameters: Sequence[nn.Parameter], norm: Tensor) -> None:
    """Clips nothing."""


def clip_by_norm(largest: float) -> Clip:
    """Clips the norm of the whole gradient, like torch.nn.utils.clip_grad_norm_."""

    def clip(parameters: Sequence[nn.Parameter], norm: Tensor) -> None:
        clip_grads_with_norm_(parameters, largest, norm)

    return clip


def clip_adaptively(factor: float, *, exempt: Sequence[nn.Parameter]) -> Clip:
    """Clips each unit's gradient to `factor` of its weights' norm (Brock et al. 2021, 4.1)."""
    from timm.utils.agc import adaptive_clip_grad  # timm takes a second

    exempted = frozenset(exempt)

    def clip(parameters: Sequence[nn.Parameter], norm: Tensor) -> None:
        adaptive_clip_grad(  # type: ignore[no-untyped-call]
            [p for p in parameters if p not in exempted], factor
        )

    return clip


@contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which the optimizer updates these parameters alone."""
    groups, wanted = optimizer.param_groups, set(parameters)
    every = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if p in wanted]
    try:
        yield
    finally:
        for group, whole_group in zip(groups, every, strict=True):
            group["params"] = whole_group
