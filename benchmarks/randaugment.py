"""RandAugment on the batch beside timm's on each image: images a second of one core.

python -m benchmarks.randaugment [--images 128] [--size 224] [--rounds 7] [--hardware NAME]

Both get the same photographs (scikit-learn's and scikit-image's, cropped and mirrored at random).
timm's transform has Pillow images in and out; "+ conversions" adds what a loader of arrays needs
around it: an image made of an array before, an array of the image after. Ours has the batch of
uint8 in place, its draws included. The clock counts this thread's CPU time, and torch has one
thread; the contenders take turns in an order drawn anew each round. Each operation's own time is in
the second table, drawn with timm's own strengths.

Geometry is bilinear in ours, and by each interpolation in timm's. timm is patched in one place: 0
bits of posterize, which Pillow 13 refuses, give black, as before.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import numpy as np
import PIL
import timm
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from skimage import data
from sklearn.datasets import load_sample_images
from timm.data import auto_augment

from benchmarks.saving import listed, save
from trainyard.data.augment.kernels import run
from trainyard.data.augment.policy import draw, parse_policy
from trainyard.data.augment.randaugment import RandAugment, plan
from trainyard.data.batch import Keys

POLICIES = ("rand-m9-mstd0.5-inc1", "rand-m15-n2-mstd0.5-mmax15-inc1")
INTERPOLATIONS = ("bilinear", None, "bicubic")  # timm's; None: one of the two at random
MEAN = (0.485, 0.456, 0.406)
SKIMAGE: Any = data

Pixels = NDArray[np.uint8]


def photographs(count: int, size: int) -> list[Pixels]:
    rng = np.random.default_rng(0)
    sources = [
        *load_sample_images().images,
        SKIMAGE.chelsea(),
        SKIMAGE.coffee(),
        SKIMAGE.astronaut(),
    ]
    found = []
    for number in range(count):
        image = Image.fromarray(sources[number % len(sources)])
        side = int(min(image.size) * rng.uniform(0.4, 1))
        left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
        crop = image.resize((size, size), box=(left, top, left + side, top + side))
        found.append(np.array(ImageOps.mirror(crop) if rng.random() < 0.5 else crop))
    return found


def posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    return ImageOps.posterize(image, bits) if bits >= 1 else Image.new("RGB", image.size)


def timms(policy: str, interpolation: str | None) -> Callable[[Image.Image], Image.Image]:
    settings: dict[str, Any] = {"translate_const": 100, "img_mean": (124, 116, 104)}
    if interpolation:
        settings["interpolation"] = Image.Resampling[interpolation.upper()]
    transform: Any = auto_augment.rand_augment_transform(policy, settings)
    for op in transform.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = posterize
    return transform  # type: ignore[no-any-return]


# --- the contenders: each augments all photographs once ---


def by_timm(pixels: list[Pixels], policy: str, interpolation: str | None) -> Callable[[], None]:
    transform, images = timms(policy, interpolation), [Image.fromarray(each) for each in pixels]

    def augment() -> None:
        for image in images:
            transform(image)

    return augment


def by_timm_on_arrays(
    pixels: list[Pixels], policy: str, interpolation: str | None
) -> Callable[[], None]:
    transform, batch = timms(policy, interpolation), np.stack(pixels)
    out = np.empty_like(batch)

    def augment() -> None:
        for number, image in enumerate(batch):
            out[number] = np.asarray(transform(Image.fromarray(image)))

    return augment


def by_trainyard(pixels: list[Pixels], policy: str, _: str | None) -> Callable[[], None]:
    transform = RandAugment(policy, seed=0, mean=MEAN)
    source_BHWC = torch.from_numpy(np.stack(pixels))
    ids, epochs = np.arange(len(pixels)), np.zeros(len(pixels), np.int64)

    def augment() -> None:
        nonlocal epochs
        epochs = epochs + 1
        batch = source_BHWC.clone().permute(0, 3, 1, 2)  # else operations pile up; is counted
        transform(batch, Keys(ids, epochs, 0))

    return augment


CONTENDERS = {
    "timm": by_timm,
    "timm + conversions": by_timm_on_arrays,
    "Trainyard": by_trainyard,
}


def one_operation(pixels: list[Pixels], policy: str, name: str) -> dict[str, Callable[[], None]]:
    """timm's and ours, always applied, at the policy's strengths."""
    always = f"{policy}-p1"
    transform: Any = timms(always, "bilinear")
    (op,) = [op for op in transform.ops if op.name == name]
    images = [Image.fromarray(each) for each in pixels]
    parsed = parse_policy(always)
    draws = draw(parsed, 0, np.arange(2000), np.zeros(2000, np.int64))
    chosen = np.flatnonzero(draws.ops[:, 0] == parsed.ops.index(name))[: len(pixels)]  # enough
    first = draws._replace(
        ops=np.where([[True, False]], draws.ops, -1)[chosen],
        arguments=draws.arguments[chosen],
    )
    size = (pixels[0].shape[0], pixels[0].shape[1])
    calls = plan(parsed, first, size, (124, 116, 104))
    batch = torch.from_numpy(np.stack(pixels))

    def timms_one() -> None:
        for image in images:
            op(image)

    return {"timm": timms_one, "Trainyard": partial(run, calls, batch)}


# --- measuring ---


def measure(
    contenders: dict[str, Callable[[], None]], count: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds of CPU time an image, of each round."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for augment in contenders.values():
        augment()  # what the first use costs is not counted
    for number in range(rounds):
        names = list(contenders)
        random.Random(number).shuffle(names)
        for name in names:
            start = time.thread_time()
            contenders[name]()
            found[name].append((time.thread_time() - start) / count * 1e6)
    return found


def policy_table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        "| policy | RandAugment | images/s of one core: median (min, max) | beside timm "
        "| beside timm + conversions |",
        "|---|---|---|---|---|",
    ]
    for title, times in found.items():
        median = {name: statistics.median(values) for name, values in times.items()}
        for name, values in times.items():
            cells = (
                f"{1e6 / median[name]:,.0f} ({1e6 / max(values):,.0f}, {1e6 / min(values):,.0f})"
            )
            ratios = [f"{median[peer] / median[name]:.2f} x" for peer in list(CONTENDERS)[:2]]
            lines.append(f"| {title} | {name} | {cells} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def operation_table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        "| operation | timm, us an image | Trainyard, us an image | factor |",
        "|---|---|---|---|",
    ]
    for name, times in found.items():
        theirs, ours = (statistics.median(times[who]) for who in ("timm", "Trainyard"))
        lines.append(f"| {name} | {theirs:,.0f} | {ours:,.0f} | {theirs / ours:.2f} x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-randaugment.json and .md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    pixels = photographs(options.images, options.size)
    load = os.getloadavg()[0]
    whole: dict[str, dict[str, list[float]]] = {}
    for policy in POLICIES:
        for interpolation in INTERPOLATIONS:
            contenders = {
                name: make(pixels, policy, interpolation) for name, make in CONTENDERS.items()
            }
            title = f"{policy}, {interpolation or 'bilinear or bicubic'} in timm"
            whole[title] = measure(contenders, len(pixels), options.rounds)
            print(title, file=sys.stderr)
    each = {
        name: measure(one_operation(pixels[:32], POLICIES[0], name), 32, options.rounds)
        for name in parse_policy(POLICIES[0]).ops
    }
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "hardware": options.hardware,
        "processor": platform.processor() or platform.machine(),
        "images": len(pixels),
        "size": options.size,
        "rounds": options.rounds,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "pillow": PIL.__version__,
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    tables = f"{policy_table(whole)}\n\n{operation_table(each)}"
    print(tables)
    if options.hardware:
        results = {"microseconds_an_image": whole, "microseconds_an_operation": each}
        text = f"# RandAugment\n\n{listed(about)}\n\n{tables}\n"
        save(f"{options.hardware}-randaugment", about | results, text)


if __name__ == "__main__":
    main()
