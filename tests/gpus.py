"""GPUs that are there, and that are not: torch tells of as many as a test wants."""

from types import SimpleNamespace

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU at hand")


def pretend(monkeypatch: pytest.MonkeyPatch, number: int, *, first: int = 0) -> None:
    """This process sees so many GPUs, "GPU-first" and those after it; none is ever used."""
    current = [0]

    def choose(device: torch.device) -> None:
        current[0] = device.index

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{first + device.index}")

    for name, value in {
        "is_available": lambda: number > 0,
        "device_count": lambda: number,
        "set_device": choose,
        "current_device": lambda: current[0],
        "get_device_properties": properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
