"""How long an image would take a device at its peak."""

import pytest
import timm
import torch
from torch import nn

from trainyard.course import build_course
from trainyard.run.metrics import ideal_seconds

COURSE = build_course(
    "10 steps", epoch_samples=64, batch=8, image_size=32, size_stages=["5 steps: 64"]
)


def test_forward_and_twice_as_much_backward() -> None:
    """A convolution by hand: 3 x 16 x 5 x 5 multiply-adds for each pixel."""
    model = nn.Conv2d(3, 16, 5, padding=2, bias=False)
    seconds = ideal_seconds(COURSE, model, peak=1e6)
    for step, size in ((0, 32), (4, 32), (5, 64), (9, 64)):
        assert seconds(step) == pytest.approx(3 * 2 * 3 * 16 * 25 * size**2 / 1e6)


def test_the_model_stays_as_it_is() -> None:
    model = timm.create_model("test_resnet", num_classes=10).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert (ideal_seconds(COURSE, model, peak=1e12)(0) or 0) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Impatient(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * float(images.sum())  # which tensors without values do not have


def test_without_a_peak_or_a_count_there_is_none() -> None:
    assert ideal_seconds(COURSE, nn.Conv2d(3, 3, 1), peak=None)(3) is None
    assert ideal_seconds(COURSE, Impatient(), peak=1e12)(3) is None
