"""The arithmetic of the forward and backward pass."""

import torch

AUTOCASTS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The mixed precision of each value of `batch.precision`, see `autocast`."""


def use_precision(name: str) -> None:
    """Set, for this process, how float32 is multiplied: as tf32 for "tf32", else as it is.

    torch's own default is neither: its convolutions are tf32 and its matrix products are not.
    bf16 and fp16 come on top of it, by autocast. By torch's older names, which keep the newer
    ones (fp32_precision) in step; the other way round torch.compile fails in torch before 2.15.
    """
    is_tf32 = name == "tf32"
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = is_tf32


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision of `dtype`, or none."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
