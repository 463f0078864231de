"""The table of GPUs."""

import pytest

from tests.errors import raises
from trainyard.hardware import accelerators, find_accelerator, named_accelerator, prices_of


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_names_as_torch_says_them(said: str, key: str) -> None:
    assert find_accelerator(said) == accelerators()[key]


@pytest.mark.parametrize(
    "said",
    [
        "NVIDIA H200 MIG 1g.18gb",  # a part of one
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "",
    ],
)
def test_what_only_looks_like_one_is_unknown(said: str) -> None:
    assert find_accelerator(said) is None


def test_no_name_stands_twice() -> None:
    assert len({each.name.lower() for each in accelerators().values()}) == len(accelerators())


@pytest.mark.parametrize("key", accelerators())
def test_figures_are_of_the_right_size(key: str) -> None:
    """A comma in the wrong place, or a peak with sparsity, shows in how they go together."""
    device = accelerators()[key]
    assert 6e12 < device.peak["fp32"] < 2e14
    assert 1.99 < device.peak["fp16"] / device.peak["fp32"] <= 35
    if "bf16" in device.peak:
        assert device.peak["bf16"] == device.peak["fp16"]
    if "tf32" in device.peak:
        assert device.peak["tf32"] == pytest.approx(device.peak["bf16"] / 2, rel=0.05)
    assert 50 < device.peak["fp16"] / device.bandwidth < 450  # operations for a byte
    assert 15e9 < device.memory < 200e9
    assert 10e9 < device.link < 1e12
    assert device.price_per_hour is None or 0.3 < device.price_per_hour < 15
    assert prices_of() >= 2025


def test_an_unknown_name() -> None:
    with raises("estimate.unknown-gpu", name="h100"):
        named_accelerator("h100")
