"""The network that whitens: its first layer on real images, its sizes, and a run of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_sample_images
from torch import nn
from torch.nn import functional

from tests.command_line import SHORT, Capture, newest, run
from tests.errors import check, refused
from tests.runs import recipe
from tests.spawn import spawn, train_joined
from trainyard.config import RunConfig
from trainyard.model.build import build_model
from trainyard.model.config import ModelConfig
from trainyard.model.whitened_convnet import WhitenedConvNet, whitened_convnet
from trainyard.world import World

NAMED = {"model.name": "whitened_convnet", "model.options": '{widths = "8-16-16"}'}
KEYS = [word for key, value in NAMED.items() for word in (f"--{key}", value)]


def small(channels: int = 3) -> WhitenedConvNet:
    return WhitenedConvNet(10, channels, widths=(8, 8, 8), depth=2)


def test_the_first_layer_whitens() -> None:
    """Its outputs are uncorrelated, of variance 1 but for small ones; half negate the others."""
    photographs = np.stack(load_sample_images().images)[:, :160, :160]
    images_BCHW = torch.from_numpy(photographs).permute(0, 3, 1, 2) / 64.0
    model = small()
    model.adapt_to(images_BCHW)
    found_BCHW = functional.conv2d(images_BCHW, model.whitening.weight)
    one, other = found_BCHW.double().transpose(0, 1).flatten(1).chunk(2)
    torch.testing.assert_close(one, -other)
    covariance = torch.cov(one)
    diagonal = covariance.diagonal()
    patches = functional.unfold(images_BCHW.double(), 2).transpose(1, 2).flatten(0, 1)
    variances = torch.linalg.eigvalsh(torch.cov(patches.T))
    torch.testing.assert_close(diagonal, variances / (variances + 5e-4), rtol=1e-3, atol=1e-4)
    assert diagonal.max() > 0.99
    assert (covariance - diagonal.diag()).abs().max() < 1e-3


def test_grey_images() -> None:
    """Directions between three equal channels have no variance, and are not blown up."""
    grey = torch.rand(8, 1, 18, 18, generator=torch.Generator().manual_seed(0))
    model, colours = small(1), small()
    model.adapt_to(grey)
    assert model.whitening.weight.shape == (8, 1, 2, 2)
    assert model.whitening.weight.abs().max() < 10
    colours.adapt_to(grey.repeat(1, 3, 1, 1))
    assert colours.whitening.weight.abs().max() < 10
    assert (colours.whitening.weight.flatten(1).abs().amax(dim=1) > 0).sum() == 8
    assert colours(grey.repeat(1, 3, 1, 1)).isfinite().all()


def test_the_first_layer_does_not_depend_on_the_order_of_sums() -> None:
    """Which depends on the number of threads and the processor."""
    images_BCHW = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    grey, weights = images_BCHW.repeat(1, 3, 1, 1), []
    for order in (torch.arange(64), torch.arange(64).flip(0)):
        model = small()
        model.adapt_to(grey[order])
        weights.append(flat(model.whitening.weight))
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("widths", "depth", "millions"), [("64-256-256", 2, 1.97), ("128-384-512", 3, 9.92)]
)
def test_its_sizes(widths: str, depth: int, millions: float) -> None:
    model = whitened_convnet(widths=widths, depth=depth)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.01)
    for size in (18, 28, 32, 50):
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 10)


def test_the_image_after_the_first_convolution_is_added_before_the_last_gelu() -> None:
    """As in airbench96; a single convolution with its GELU was bridged."""
    stage = whitened_convnet(widths="8-8-8", depth=3).stages[0].eval()
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.uniform_(-1, 1)
        images_BCHW = torch.rand(1, 24, 8, 8)
        convolution, pool, norm, gelu, rest = stage
        first_BCHW = gelu(norm(pool(convolution(images_BCHW))))
        third_BCHW = nn.Sequential(*list(rest)[:-1])(first_BCHW)
        torch.testing.assert_close(stage(images_BCHW), gelu(first_BCHW + third_BCHW))


def test_timm_knows_it_by_its_name() -> None:
    config = ModelConfig(name="whitened_convnet", options={"widths": "8-8-8"})
    model = build_model(config, num_classes=7, image_size=28, other_sizes={32})
    assert isinstance(model, WhitenedConvNet)
    assert not model.whitening.weight.requires_grad


@pytest.mark.slow
def test_a_run_its_resume_and_its_export(
    digits: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--data", digits, *KEYS, *SHORT, "--json")
    assert run("train", "debug", "--run", "whole", *options, "--run.save_every", "1 steps") == 0
    start = "whole/checkpoints/step-00000001"
    assert run("train", "debug", "--run", "rest", *options, "--run.resume", start) == 0
    one, other = (load_file(newest(Path(f)) / "model.safetensors") for f in ("whole", "rest"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    capsys.readouterr()
    assert run("evaluate", "whole", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["samples"] == 364
    assert run("export", "whole", "m.safetensors") == 0


def whitening(world: World, config: RunConfig, folder: Path) -> list[float]:
    """The first layer after a run, which never changes it."""
    train_joined(config, folder, world)
    return flat(load_file(newest(folder) / "model.safetensors")["whitening.weight"])


def flat(weight: torch.Tensor) -> list[float]:
    return [float(value) for value in weight.flatten()]


@pytest.mark.slow
def test_ranks_start_from_the_same_images(digits: Path, tmp_path: Path) -> None:
    """Two ranks, each with half of every batch, get the first layer of one."""
    config = recipe(digits, NAMED, {"run.length": "2 steps"})
    alone = whitening(World(), config, tmp_path / "1")
    one, other = spawn(whitening, 2, config, tmp_path / "2")
    assert one == other == alone
    torch.manual_seed(0)
    assert alone != flat(whitened_convnet(widths="8-16-16").whitening.weight)


def test_wrong_options_are_refused(digits: Path) -> None:
    given = ("train", "debug", "--data", digits, "--model.name", "whitened_convnet")
    error = refused(*given, "--model.options", '{widths = "8-x"}')
    check(error, "model.not-built", name="whitened_convnet")
    check(refused(*given, "--model.checkpoint", "timm"), "weights.not-downloaded")
