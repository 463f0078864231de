"""Normalising: one way for each device, the same numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.data.device.feed import Normalise
from trainyard.training.precision import autocast


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normalise(
    device: str = "cpu", *, channels_last: bool = False, dtype: torch.dtype = torch.float32
) -> Normalise:
    return Normalise(
        torch.device(device), mean=MEAN, std=STD, channels_last=channels_last, dtype=dtype
    )


def pixels(*, planar: bool = False) -> Tensor:
    """Images of 40 x 24 pixels, in the loader's layout or in that of some transforms."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(0, 256, (5, 24, 40, 3), dtype=torch.uint8, generator=generator)
    found[0, 0, 0], found[0, 0, 1] = 0, 255
    pixels_BCHW = found.permute(0, 3, 1, 2)
    return pixels_BCHW.contiguous() if planar else pixels_BCHW


def plain(pixels_BCHW: Tensor) -> Tensor:
    shift = torch.tensor(MEAN).mul(255).view(1, 3, 1, 1)
    scale = torch.tensor(STD).mul(255).reciprocal().view(1, 3, 1, 1)
    return (pixels_BCHW.float() - shift) * scale


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_the_cpu_every_bit_is_as_in_plain_arithmetic(
    planar: bool, channels_last: bool, dtype: torch.dtype
) -> None:
    given = pixels(planar=planar)
    before = given.clone()
    found = normalise(channels_last=channels_last, dtype=dtype)(given)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert torch.equal(found, plain(given).to(dtype))
    assert found.is_contiguous(memory_format=layout)
    assert torch.equal(given, before)


def test_plain_arithmetic_means_what_one_thinks() -> None:
    found = normalise()(pixels())[0, :, 0, :2].T.tolist()
    for pixel, expected in zip(found, (0.0, 1.0), strict=True):
        for channel, value in enumerate(pixel):
            assert abs(value - (expected - MEAN[channel]) / STD[channel]) < 1e-6


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_kernel_for_gpus_is_off_by_rounding_only(channels_last: bool) -> None:
    for dtype, most in zip(DTYPES, (3e-7, 2**-7, 2**-10), strict=True):
        found = normalise(channels_last=channels_last, dtype=dtype)._in_one_kernel(pixels())
        assert (found.float() - plain(pixels())).abs().max() <= most
        assert found.dtype == dtype


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_is_asked_for_one_kernel(channels_last: bool, dtype: torch.dtype) -> None:
    """By the rules that a GPU's tensors have, with no GPU."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    with FakeTensorMode():
        given = torch.empty(5, 24, 40, 3, dtype=torch.uint8, device="cuda").permute(0, 3, 1, 2)
        change = normalise("cuda", channels_last=channels_last, dtype=dtype)
        with Calls() as calls:
            found = change(given)
        assert calls.names == ["aten.empty.memory_format", "aten.addcmul.out"]
        assert (found.device.type, found.dtype, found.shape) == ("cuda", dtype, given.shape)
        assert found.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_rounded_image_gives_the_logits_of_one_that_autocast_rounds(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(plain(pixels()))
    with autocast(torch.device("cpu"), dtype):
        expected = model(normalise()(pixels()))
        assert torch.equal(model(normalise(dtype=dtype)(pixels())), expected)
