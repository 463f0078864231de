"""Decoding on a GPU by torchvision, what a loader leaves to it, and normalising on each device."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.errors import raises
from tests.gpus import needs_gpu
from tests.images import encode
from trainyard.config import check as check_recipe
from trainyard.course import build_course
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.batch import Batch
from trainyard.data.config import DataConfig
from trainyard.data.decode.crops import CentralCrop, RandomResizedCrop
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.rendering import PLAIN
from trainyard.data.device.feed import Normalise
from trainyard.data.device.gpu_decode import check, crop_and_resize, decode
from trainyard.data.feeds import Feeds
from trainyard.data.index.build import open_index
from trainyard.data.index.table import Index
from trainyard.data.loader import encoded_batch as module
from trainyard.data.loader.encoded_batch import ENTRY, JPEG, NOTHING, PIXELS, put_encoded, stretches
from trainyard.data.order import training_plan
from trainyard.data.storage.encoded import EncodedSpans, in_memory
from trainyard.data.storage.source import LocalFile
from trainyard.image_size import ImageSize, height_width
from trainyard.training.precision import autocast
from trainyard.world import World

CPU, SIZE = torch.device("cpu"), 96
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=needs_gpu)]
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


# --- slots of encoded images: what a loader process leaves to a GPU, and what it does itself ---

SLOT_SIZE = 32
CROP = RandomResizedCrop(seed=3, scale=(0.2, 1.0), ratio=(0.8, 1.25), flip=0.5)


def image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


PHOTOGRAPHS = [
    encode(image(80, 60)),
    encode(image(50, 90).convert("L")),
    encode(image(64, 64), progressive=True),
]


def put(
    contents: "EncodedSpans | Sequence[bytes]",
    count: int,
    *,
    mean: float = 60_000,
    crop: Any = CROP,
) -> tuple[NDArray[np.void], NDArray[np.uint8], dict[int, str]]:
    """What lies in a new slot then, and what was bad."""
    side = module.side_of(mean, SLOT_SIZE)
    images_BHWC = np.full((count, side, side, 3), 255, np.uint8)
    ids = np.arange(count) + 100
    draws = crop.draw(ids, ids % 7)
    options: dict[str, Any] = {"size": SLOT_SIZE, "how": "bilinear", "rendering": PLAIN}
    bad = put_encoded(contents, draws, images_BHWC, **options)
    return *stretches(images_BHWC), bad


def crops_of(count: int, sizes: Any, crop: Any = CROP) -> Any:
    ids = np.arange(count) + 100
    return crop.draw(ids, ids % 7)(np.array(sizes))


@pytest.mark.parametrize("crop", [CROP, CentralCrop(SLOT_SIZE, 0.875)], ids=["random", "central"])
def test_jpegs_are_left_as_they_are_with_the_plans_crops(crop: Any) -> None:
    entries, rest_BN, bad = put(PHOTOGRAPHS, 3, crop=crop)
    crops = crops_of(3, [(80, 60), (50, 90), (64, 64)], crop)
    assert bad == {}
    assert entries["kind"].tolist() == [JPEG] * 3
    assert np.array_equal(entries["box"], crops.boxes)
    assert np.array_equal(entries["flip"], crops.flips)
    assert (entries["resizes_first"] == crops.resizes_first).all()
    for content, entry, rest in zip(PHOTOGRAPHS, entries, rest_BN, strict=True):
        assert rest[: entry["length"]].tobytes() == content


OTHERS = {
    "png": encode(image(80, 60), "PNG"),
    "cmyk": encode(image(80, 60).convert("CMYK")),
    "long": encode(image(200, 200), quality=100, subsampling=0),
    "wide": encode(image(2000, 1500), quality=10),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_for_a_gpu_is_there_as_pixels(name: str) -> None:
    """With a crop of nearly all of it, and 10 kB for an image."""
    contents = [PHOTOGRAPHS[0], OTHERS[name], PHOTOGRAPHS[1]]
    mean = 50_000 if name == "wide" else 5_000
    crop = RandomResizedCrop(seed=3, scale=(0.9, 1.0), ratio=(0.75, 1.5), flip=0.5)
    entries, rest_BN, bad = put(contents, 3, mean=mean, crop=crop)
    assert bad == {}
    assert entries["kind"].tolist() == [JPEG, PIXELS, JPEG]
    ids = np.arange(3) + 100
    expected = np.empty((1, SLOT_SIZE, SLOT_SIZE, 3), np.uint8)
    decode_batch(contents[1:2], crop.draw(ids, ids % 7)[1:2], expected, "bilinear")
    assert entries["length"][1] == expected.size
    found = rest_BN[1, : expected.size].reshape(expected.shape)
    assert np.abs(found.astype(int) - expected).max() <= 2


def test_of_bad_images_nothing_is_there_and_the_reason_is_told() -> None:
    contents = [b"", PHOTOGRAPHS[0], b"no image", PHOTOGRAPHS[0][:100]]
    entries, _, bad = put(contents, 4)
    assert entries["kind"].tolist() == [NOTHING, JPEG, NOTHING, NOTHING]
    assert sorted(bad) == [0, 2, 3]
    assert (bad[0], bad[2]) == ("the file is empty", "not an image")


def test_an_image_that_cannot_be_read_is_bad(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(PHOTOGRAPHS[1][:50])
    where = in_memory(PHOTOGRAPHS)[1:]
    sources = PHOTOGRAPHS[0], LocalFile(str(tmp_path / "cut")), PHOTOGRAPHS[2]
    entries, _, bad = put(EncodedSpans(sources, *where), 3)
    assert entries["kind"].tolist() == [JPEG, NOTHING, JPEG]
    assert bad == {1: f"{tmp_path / 'cut'} is truncated or has changed since it was indexed"}


def test_a_stretch_holds_an_entry_and_what_follows() -> None:
    for mean, size in ((110_000, 224), (3_000, 224), (50_000, 64)):
        side = module.side_of(mean, size)
        room = 3 * side**2 - ENTRY.itemsize
        assert room >= max(2 * mean, 3 * size**2)
        assert room < 1.01 * max(2 * mean, 3 * size**2) + 1000


# --- normalising: one way for each device, the same numbers ---


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
