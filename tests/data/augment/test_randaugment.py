"""Policies on batches against timm's and torchvision's, one Pillow image at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from skimage import data
from sklearn.datasets import load_sample_images
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP, auto_augment_policy
from torchvision.transforms import InterpolationMode, TrivialAugmentWide
from torchvision.transforms.autoaugment import _apply_op

from trainyard.data.augment.kernels import KernelCall, run, send
from trainyard.data.augment.policy import ARGUMENTS, LEVELS, draw, parse_policy
from trainyard.data.augment.randaugment import (
    RandAugment,
    affine_maps,
    colour_call,
    plan,
    warp_call,
)
from trainyard.data.batch import Keys

Pixels = NDArray[np.uint8]
SKIMAGE: Any = data
MEAN = (0.485, 0.456, 0.406)
FILL = (124, 116, 104)


def _noise(height: int, width: int, *levels: int) -> Pixels:
    drawn = np.random.default_rng(height * width).choice(levels or range(256), (height, width, 3))
    return drawn.astype(np.uint8)


def _photographs() -> dict[str, Pixels]:
    china, flower = load_sample_images().images
    pictures = {"china": china, "flower": flower, "cat": SKIMAGE.chelsea(), "cup": SKIMAGE.coffee()}
    return {
        name: np.array(Image.fromarray(pixels).resize((128, 96 + 16 * number)))
        for number, (name, pixels) in enumerate(pictures.items())
    }


PHOTOGRAPHS = _photographs()
ODD: dict[str, Pixels] = {
    "constant": np.full((20, 30, 3), (7, 130, 255), np.uint8),
    "black": np.zeros((9, 9, 3), np.uint8),
    "white": np.full((9, 9, 3), 255, np.uint8),
    "grey": np.repeat(
        np.array(Image.fromarray(SKIMAGE.camera()).resize((64, 48)))[..., None], 3, 2
    ),
    "1 x 1": _noise(1, 1),
    "2 x 1": _noise(2, 1),
    "3 x 2": _noise(3, 2),
    "1 x 40": _noise(1, 40),
    "5 x 4": _noise(5, 4),
    "noise": _noise(61, 67),
    "extreme": _noise(40, 50, 0, 255),
    "dark": _noise(33, 31, *range(20)),
}
IMAGES = PHOTOGRAPHS | ODD
COLOURS = {
    "AutoContrast": [0.0],
    "Equalize": [0.0],
    "Invert": [0.0],
    "Posterize": [-2.0, 0.0, 1.0, 2.0, 4.0, 7.0, 8.0],
    "Solarize": [0.0, 1.0, 20.0, 128.0, 255.0, 256.0],
    "SolarizeAdd": [0.0, 1.0, 55.0, 110.0, 128.0],
    "Color": [0.0, 0.1, 0.55, 1.0, 1.3, 1.9, 2.35],
    "Contrast": [0.1, 0.55, 1.0, 1.3, 1.9, 2.35],
    "Brightness": [0.1, 0.55, 1.0, 1.3, 1.9, 2.35],
    "Sharpness": [0.1, 0.55, 1.0, 1.3, 1.9, 2.35],
    "Desaturate": [0.0, 0.3, 0.5],
    "GaussianBlur": [0.1, 0.5, 0.9, 1.4, 1.7, 2.0],
}
WITHIN_ONE = {"Contrast"}  # the others are exact
MOVES = {
    "Rotate": [-45.0, -30.0, -3.7, 0.0, 11.2, 30.0],
    "ShearX": [-0.45, -0.3, 0.0, 0.08, 0.3],
    "ShearY": [-0.45, -0.3, 0.0, 0.08, 0.3],
    "TranslateXRel": [-1.2, -0.675, -0.3, -0.011, 0.0, 0.25, 0.45, 0.999],
    "TranslateYRel": [-1.2, -0.675, -0.3, -0.011, 0.0, 0.25, 0.45, 0.999],
}


def reference(pixels: Pixels, name: str, argument: float) -> Pixels:
    """timm's operation on one image."""
    image = Image.fromarray(pixels)
    if name.endswith("Wide"):
        plain = name.removesuffix("Wide")
        shift = {"Brightness": -1, "Color": -1, "Contrast": -1, "Sharpness": -1}.get(plain, 0)
        sign = -1 if plain.startswith("Translate") else 1
        bilinear = InterpolationMode.BILINEAR
        return np.array(_apply_op(image, plain, sign * argument + shift, bilinear, None))
    if name == "Identity":
        return pixels
    if name.startswith("Posterize") and argument < 1:  # Pillow 13 refuses, those before: black
        return np.zeros_like(pixels)
    arguments: list[Any] = [argument]
    if name in {"AutoContrast", "Equalize", "Invert"}:
        arguments = []
    elif name.startswith(("Posterize", "Solarize")):
        arguments = [int(argument)]
    if name == "Desaturate":
        name = "Color"  # and its factor as ours has it: 1 less than timm's share
    elif name == "GaussianBlurRand":
        name = "GaussianBlur"
    operation: Any = NAME_TO_OP[name]
    bilinear = Image.Resampling.BILINEAR
    return np.array(operation(image, *arguments, fillcolor=FILL, resample=bilinear))


def ours(pixels: list[Pixels], calls: list[KernelCall]) -> NDArray[np.int64]:
    batch = torch.from_numpy(np.stack(pixels))
    run(calls, batch)
    return batch.numpy().astype(np.int64)


# --- each operation ---


@pytest.mark.parametrize("name", COLOURS)
@pytest.mark.parametrize("image", IMAGES)
def test_a_colour_operation_is_pillows(image: str, name: str) -> None:
    """All arguments in one batch; untouched samples stay as they are."""
    pixels, arguments = IMAGES[image], COLOURS[name]
    rows = np.arange(1, len(arguments) + 1)
    found = ours([pixels] * (len(rows) + 2), [colour_call(name, rows, np.array(arguments))])
    np.testing.assert_array_equal(found[[0, -1]], [pixels, pixels])
    for row, argument in zip(rows.tolist(), arguments, strict=True):
        difference = np.abs(found[row] - reference(pixels, name, argument))
        assert difference.max() <= (1 if name in WITHIN_ONE else 0), argument
        assert image not in PHOTOGRAPHS or difference.mean() < 0.01


@pytest.mark.parametrize("image", IMAGES)
def test_geometric_operations_are_pillows(image: str) -> None:
    """All in one batch: within one grey level, and mostly exact."""
    pixels = IMAGES[image]
    size = (pixels.shape[0], pixels.shape[1])
    maps = [affine_maps(name, np.array(given), *size) for name, given in MOVES.items()]
    kinds = [(name, argument) for name, given in MOVES.items() for argument in given]
    rows = np.arange(len(kinds))
    found = ours([pixels] * len(kinds), [warp_call(rows, np.concatenate(maps), size, FILL)])
    differences: dict[str, list[NDArray[np.int64]]] = {}
    for row, (name, argument) in enumerate(kinds):
        difference = np.abs(found[row] - reference(pixels, name, argument))
        differences.setdefault(name, []).append(difference)
    for name, difference in differences.items():
        assert np.max(difference) <= 1, name
        assert np.mean(np.array(difference) > 0) < 0.05, name


# --- whole policies ---

POLICIES = [
    "rand-m9-mstd0.5-inc1",
    "rand-m15-n3-mstd2-mmax15-inc1",
    "rand-m7-n1-p1",
    "rand-m9-n4-p0.8-mstd101-tweights",
    "rand-m9-n3-t3aw",
    "3a",
    "original-mstd0.5",
    "originalr",
    "v0",
    "v0r",
    "ta_wide",
    "augmix",
    "augmix-m9-w4-d2-mstd1",
]


@pytest.mark.parametrize("text", POLICIES)
def test_a_policy_is_timms_operations_one_after_the_other(text: str) -> None:
    policy = parse_policy(text)
    square = [np.array(Image.fromarray(p).resize((96, 96))) for p in PHOTOGRAPHS.values()]
    pictures = square * 16
    draws = draw(policy, 3, np.arange(len(pictures)), np.zeros(len(pictures), np.int64))
    keys = Keys(np.arange(len(pictures)), np.zeros(len(pictures), np.int64), 0)
    batch = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    whole = RandAugment(text, seed=3, mean=MEAN)(batch, keys).permute(0, 2, 3, 1)
    found = whole.numpy().astype(np.int64)
    changed, total = 0, 0.0
    for row, pixels in enumerate(pictures):
        chains = []
        for columns in np.split(np.arange(policy.layers), policy.chains or 1):
            expected = pixels
            for layer in columns[draws.ops[row, columns] >= 0]:
                name = policy.ops[draws.ops[row, layer]]
                expected = reference(expected, name, float(draws.arguments[row, layer]))
            chains.append(expected)
        if policy.chains:  # as AugMixAugment in timm
            share, *weights = draws.shares[row].astype(np.float32)
            mixed = sum(w * one.astype(np.float32) for w, one in zip(weights, chains, strict=True))
            mix = Image.fromarray(np.clip(mixed, 0, 255).astype(np.uint8))
            expected = np.array(Image.blend(Image.fromarray(pixels), mix, float(share)))
        difference = np.abs(found[row] - expected)
        # A later operation can widen a difference of one: equalize or one bit of posterize, say.
        assert difference.mean() < 0.4
        assert (difference > 4).mean() < 0.01
        total += difference.mean()
        changed += bool((expected != pixels).any())
    assert total / len(pictures) < 0.02
    assert changed > len(pictures) / 3


@pytest.mark.parametrize("text", ["original", "originalr", "v0", "v0r"])
def test_the_pairs_of_autoaugment_are_timms(text: str) -> None:
    policy = parse_policy(text)
    of_timm: Any = auto_augment_policy
    pairs = of_timm(text, {"translate_const": 250, "img_mean": FILL})
    theirs = [(op.name, op.prob, op.magnitude) for pair in pairs for op in pair]
    assert isinstance(policy.prob, tuple)
    assert [*zip(policy.ops, policy.prob, policy.magnitudes, strict=True)] == theirs
    draws = draw(policy, 0, np.arange(4000), np.zeros(4000, np.int64))
    assert {*np.unique(draws.ops)} == {-1, *(n for n, one in enumerate(theirs) if one[1] > 0)}
    for column, ops in enumerate(draws.ops.T):
        assert (ops[ops >= 0] % 2 == column).all()
    for name, _, level in theirs:
        argument = ARGUMENTS[name](np.array([level]), np.array([False]), np.array([0.0]))
        levels: Any = LEVEL_TO_ARG[name]
        wanted = levels(level, {"translate_const": 250}) if levels else (0.0,)
        assert abs(abs(argument[0]) - abs(wanted[0])) < 1e-9


def test_the_magnitudes_of_trivialaugment_are_torchvisions() -> None:
    space = TrivialAugmentWide()._augmentation_space(31)
    policy = parse_policy("ta_wide")
    assert [name.removesuffix("Wide") for name in policy.ops] == [*space]
    levels = np.arange(31) / 30 * LEVELS
    for name, (magnitudes, _) in zip(policy.ops, space.values(), strict=True):
        found = ARGUMENTS[name](levels, np.zeros(31, bool), np.zeros(31))
        if magnitudes.ndim:
            wanted = magnitudes.double().numpy()
            wanted = np.ceil(wanted) if name == "SolarizeWide" else wanted
            wanted = -np.trunc(wanted) if name.startswith("Translate") else wanted
            base = 1.0 if {name[:-4]} & {"Brightness", "Color", "Contrast", "Sharpness"} else 0.0
            np.testing.assert_allclose(found, base + wanted, atol=1e-5)
    draws = draw(policy, 0, np.arange(9000), np.zeros(9000, np.int64))
    turns = np.unique(draws.arguments[draws.ops == policy.ops.index("RotateWide")])
    np.testing.assert_allclose(turns, np.linspace(-135, 135, 61), atol=1e-9)


# --- the device ---


def test_nothing_waits_for_the_device() -> None:
    """On the meta device a result that the host asks for is an error."""
    policy = parse_policy("rand-m9-n3-p1-t3aw")
    more = parse_policy("rand-m9-n3-p1")
    images = torch.empty(64, 32, 32, 3, dtype=torch.uint8, device="meta")
    used: set[int] = set()
    for each in (policy, more):
        draws = draw(each, 0, np.arange(64), np.zeros(64, np.int64))
        used |= {hash((id(each), op)) for op in draws.ops.ravel().tolist()}
        run(plan(each, draws, (32, 32), FILL), images)
    assert len(used) == len(policy.ops) + len(more.ops)


def test_arrays_are_sent_as_they_are() -> None:
    arrays: list[NDArray[Any]] = [
        np.arange(3, dtype=np.uint8),
        np.arange(6.0, dtype=np.float32).reshape(2, 3).T,
        np.array([-1, 2], np.int16),
        np.array([[2**40], [-(2**50)]], np.int64),
        np.zeros((0, 4), np.float64),
        np.array([[1 - 2j]], np.complex64),
    ]
    for sent, array in zip(send(arrays, torch.device("cpu")), arrays, strict=True):
        assert sent.numpy().dtype == array.dtype
        np.testing.assert_array_equal(sent.numpy(), array)
    assert send([], torch.device("cpu")) == []
