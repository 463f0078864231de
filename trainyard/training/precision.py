"""Numeric precision of the forward and backward pass."""

import os

import torch

from trainyard.world import are_threads_set

AUTOCASTS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Autocast dtype of each value of `batch.precision`; None: no mixed precision."""


def use_precision(name: str) -> None:
    """Set this process's float32 arithmetic: tf32 for "tf32", else full precision.

    torch's default is neither: its convolutions use tf32 and its matrix products do not. bf16 and
    fp16 are autocast on top. The code sets torch's older options, which also update the newer ones
    (fp32_precision); the other way round, torch.compile fails in torch before 2.15.

    cuDNN times its convolution algorithms for each shape and takes the fastest, unless
    torch.use_deterministic_algorithms is on: the fastest may differ between two processes.
    """
    is_tf32 = name == "tf32"
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = is_tf32
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()


def use_same_kernels(device: torch.device) -> None:
    """Makes this process compute the same bits as any other one on such a device.

    On a CPU the order of sums depends on the number of threads: one, unless the user has set
    OMP_NUM_THREADS. Call it before `use_precision`.
    """
    if device.type == "cpu":
        if not are_threads_set():
            torch.set_num_threads(1)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to `dtype`; None: no mixed precision."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
