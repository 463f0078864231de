"""Decoding by torchvision: on the CPU, which it can too, and on a GPU where there is one."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.errors import raises
from tests.gpus import needs_gpu
from tests.images import encode
from trainyard.config import check as check_recipe
from trainyard.course import build_course
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.batch import Batch
from trainyard.data.config import DataConfig
from trainyard.data.decode.crops import CentralCrop, RandomResizedCrop
from trainyard.data.device.gpu_decode import check, crop_and_resize, decode
from trainyard.data.feeds import Feeds
from trainyard.data.index.build import open_index
from trainyard.data.index.table import Index
from trainyard.data.loader.encoded_batch import ENTRY, JPEG
from trainyard.data.order import training_plan
from trainyard.image_size import ImageSize, height_width
from trainyard.world import World

CPU, SIZE = torch.device("cpu"), 96
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda", 0),
        marks=needs_gpu,
    ),
]
# Grey levels: nvJPEG repeats the pixels of halved colour planes, where libjpeg interpolates.
LIMITS = {"cpu": 1, "cuda": 40}


def photographs() -> list[bytes]:
    """Of all samplings, one grey, one progressive, one with an orientation, which has no effect."""
    first, second = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    turned = Image.Exif()
    turned[0x0112] = 6
    return [
        encode(first, quality=95, subsampling=0),
        encode(second.crop((3, 5, 500, 402)), quality=85, subsampling=1),
        encode(first.crop((30, 5, 401, 420)), quality=75, subsampling=2),
        encode(second.convert("L"), quality=90),
        encode(first, quality=90, progressive=True),
        encode(second, quality=90, exif=turned),
    ]


def in_tensors(contents: list[bytes]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.frombuffer(content, np.uint8).copy()) for content in contents]


# --- one image ---


def by_pillow(
    content: bytes, box: Any, size: ImageSize, *, first: bool, how: str
) -> NDArray[np.int64]:
    image = Image.open(io.BytesIO(content)).convert("RGB")
    kind, (height, width) = Image.Resampling[how.upper()], height_width(size)
    if first:
        return np.asarray(image.resize((width, height), kind, box=tuple(box))).astype(np.int64)
    left, top, right, bottom = map(int, box)
    cropped = image.crop((left, top, right, bottom))
    return np.asarray(cropped.resize((width, height), kind)).astype(np.int64)


CROPS = [
    RandomResizedCrop(seed=1, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5),
    CentralCrop(SIZE, 0.875),
    CentralCrop((64, 120), 0.875),
]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", CROPS, ids=["random", "central", "rectangle"])
def test_crops_are_those_of_pillow(
    crop: RandomResizedCrop | CentralCrop, how: Any, device: torch.device
) -> None:
    size = crop.size if isinstance(crop, CentralCrop) else SIZE
    contents = photographs()
    decoded = decode(in_tensors(contents), device)
    sizes = np.array([Image.open(io.BytesIO(content)).size for content in contents])
    for visit in range(5):
        ids = np.arange(len(contents))
        crops = crop.draw(ids, ids * 0 + visit)(sizes)
        for row, content in enumerate(contents):
            pixels, box, flip = decoded[row], crops.boxes[row], crops.flips[row]
            assert pixels is not None
            entry = np.array((JPEG, 0, box, flip, crops.resizes_first), ENTRY)[()]
            found = crop_and_resize(pixels, entry, size, how).cpu().numpy().astype(np.int64)
            expected = by_pillow(content, box, size, first=crops.resizes_first, how=how)
            expected = expected[:, ::-1] if flip else expected
            off = np.abs(found - expected)
            assert off.max() <= LIMITS[device.type] and np.median(off) <= 1


REFUSED = {
    "no image": b"no image",
    "empty": b"",
    "cut short": photographs()[0][:200],
    "another format": encode(Image.new("RGB", (20, 20)), "PNG"),
}


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decoded_is_none(name: str, device: torch.device) -> None:
    """torchvision fails for the whole list then; all others are decoded."""
    good, bad = photographs()[0], REFUSED[name]
    found = decode(in_tensors([good, bad, good, good, good]), device)
    assert [pixels is None for pixels in found] == [False, True, False, False, False]
    expected = np.asarray(Image.open(io.BytesIO(good))).astype(int)
    for pixels in found[2:]:
        assert pixels is not None and pixels.device == device
        off = np.abs(pixels.permute(1, 2, 0).cpu().numpy() - expected)
        assert off.max() <= LIMITS[device.type]
    assert decode([], device) == []


@needs_gpu
def test_memory_that_queued_kernels_still_read_is_spared() -> None:
    """torchvision writes on a stream of its own to memory that was freed on the current one."""
    device, contents = torch.device("cuda", 0), in_tensors(photographs()[:1] * 8)
    shape = (3, *load_sample_images().images[0].shape[:2])
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(20):
            held = [torch.full(shape, 7, dtype=torch.uint8, device=device) for _ in range(8)]
            stream.synchronize()
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # kernels wait
            sums = torch.stack([pixels.sum() for pixels in held])
            held.clear()
            decode(contents, device)
            assert (sums == 7 * math.prod(shape)).all()


# --- whole feeds ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen images of two classes: a PNG and a CMYK one, and one that is cut short."""
    folder = tmp_path_factory.mktemp("photographs")
    for number, content in enumerate(photographs() * 2):
        path = folder / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content[: len(content) // 2] if number == 7 else content)
    image = Image.open(io.BytesIO(photographs()[0]))
    image.save(folder / "a" / "90.png")
    image.convert("CMYK").save(folder / "b" / "91.jpg")
    return folder


@pytest.fixture
def index(folder: Path) -> Index:
    return open_index(str(folder))


def feeds(device: torch.device, where: str) -> Feeds:
    data = DataConfig.model_validate({"image_size": 64, "threads": 2, "decode": where})
    return Feeds(
        data=data,
        augment=AugmentConfig(),
        global_batch=5,
        seed=0,
        channels_last=False,
        world=World(),
        device=device,
    )


def training(maker: Feeds, index: Index) -> list[Batch]:
    """Two epochs, with another image size in the second."""
    plan = training_plan(maker.data, index, global_batch=5, seed=0)
    course = build_course(
        "6 steps", epoch_samples=14, batch=5, image_size=64, size_stages=("3 steps: 80",)
    )
    with maker.train(index, plan, course) as feed:
        feed.seek(0, 0)
        return list(feed)


def evaluation(maker: Feeds, index: Index) -> list[Batch]:
    with maker.evaluation(index) as feed:
        return list(feed)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_batches_are_those_that_the_cpu_decodes(
    kind: str, device: torch.device, index: Index, folder: Path
) -> None:
    found, expected = (
        training(maker, index) if kind == "training" else evaluation(maker, index)
        for maker in (feeds(device, "gpu"), feeds(CPU, "cpu"))
    )
    assert len(found) == len(expected) == (6 if kind == "training" else 3)
    for one, other in zip(found, expected, strict=True):
        for name in ("ids", "labels", "weights"):
            assert torch.equal(getattr(one, name).cpu(), getattr(other, name))
        assert [sample.id for sample in one.bad] == [sample.id for sample in other.bad]
        for sample in one.bad:
            assert sample.file == str(folder / "b" / "07.jpg")
            assert "truncated" in sample.reason
        off = (one.images_BCHW.cpu() - other.images_BCHW).abs().mul(0.225 * 255)
        # On the CPU that of the extension in C, where colours are bright.
        assert off.max() <= (24 if device == CPU else 60)
        assert off.mean() < (0.6 if device == CPU else 1.5)
    assert sum(len(batch.bad) for batch in found) == (2 if kind == "training" else 1)


# --- what is said ---


def test_without_a_gpu_the_recipe_is_refused() -> None:
    with raises("recipe.decode-without-gpu"):
        check(CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is decoded")
def test_a_torchvision_that_cannot_decode_is_refused() -> None:
    with raises("recipe.gpu-decode-unavailable"):
        check(torch.device("cuda", 0))


@needs_gpu
def test_with_a_gpu_the_recipe_is_taken() -> None:
    check(torch.device("cuda", 0))


def test_streams_are_decoded_on_the_cpu() -> None:
    tree = {"data": {"order": "join", "decode": "gpu"}}
    with raises("recipe.keys-conflict", setting="data.decode = 'gpu'"):
        check_recipe(tree)
