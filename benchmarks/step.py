"""Steps of our whole training loop beside those of the field's, on one machine, in turns.

python -m benchmarks.step FOLDER --timm CHECKOUT [--data synthetic|jpeg] [--models resnet18]
    [--size 64] [--batch 32] [--steps 60] [--rounds 5] [--hardware NAME]
python -m benchmarks.step FOLDER --timm CHECKOUT --device cuda --size 224 --batch 256 --peak 989
    --models resnet50 convnext_tiny vit_base_patch16_224 vit_small_patch16_224

Contenders, each in a process of its own, in turns: `trainyard` (everything of a run but the last
evaluation), timm's own train.py out of a CHECKOUT of its repository, torchvision's reference loop
and a bare loop, both written out here. The same model, batch, optimizer and data for all: either
one batch of tensors that is there already (synthetic), or JPEGs of 500 x 375 in FOLDER with a
random crop and flip, by two threads or workers. The clock is the optimizer's: from the end of one
update to the end of another, so starting and stopping count for nobody. On a GPU all use bf16,
channels last and torch.compile; --peak, its TFLOP/s, gives the share of it that is used (MFU).
Bookkeeping, on a CPU, is what Trainyard spends outside of forward, loss, backward and the
optimizer's update, timed inside its process: from process to process times differ by more.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.saving import listed, save

WARM_UP = 10  # updates before the clock starts
CLASSES = 10
IMAGES = 4000
WORKERS = 2
LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4


def make_images(folder: Path) -> None:
    """An image folder of pieces of real photographs, zoomed by up to two: 500 x 375, 100 kB."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    photos: Any = data
    arrays = [*load_sample_images().images, photos.astronaut(), photos.cat(), photos.coffee()]
    photographs = [Image.fromarray(array) for array in arrays]
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        place = folder / ("val" if number < 40 else "train") / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        photograph = photographs[rng.integers(len(photographs))]
        width = rng.uniform(250, 400)
        left = rng.uniform(0, photograph.width - width)
        top = rng.uniform(0, photograph.height - width * 3 / 4)
        box = (left, top, left + width, top + width * 3 / 4)
        piece = photograph.resize((500, 375), Image.Resampling.BICUBIC, box=box)
        piece.save(place / f"{number:05d}.jpg", quality=int(rng.integers(95, 99)))


# --- the contenders ---


def fixed_batch(options: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, 3, options.size, options.size)
    images = torch.randn(shape, generator=generator).to(options.device)
    labels = torch.randint(CLASSES, (options.batch,), generator=generator).to(options.device)
    return images.to(memory_format=layout(options)), labels


def layout(options: argparse.Namespace) -> Any:
    import torch

    return torch.channels_last if options.device == "cuda" else torch.contiguous_format


def autocast(options: argparse.Namespace) -> Any:
    import torch

    return torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda")


def make_model(options: argparse.Namespace) -> tuple[Any, Any]:
    import timm
    import torch

    model: Any = timm.create_model(options.model, num_classes=CLASSES)
    model = model.to(options.device, memory_format=layout(options)).train()
    if options.device == "cuda":
        model.compile()
    optimizer = torch.optim.SGD(
        model.parameters(), LR, momentum=MOMENTUM, weight_decay=DECAY, fused=True
    )
    return model, optimizer


def loader(options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """What torchvision's reference scripts make of an image folder."""
    import torch
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [
        transforms.RandomResizedCrop(options.size),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    dataset = ImageFolder(str(options.folder / "train"), transforms.Compose(steps))
    batches: Any = torch.utils.data.DataLoader(
        dataset, options.batch, shuffle=True, num_workers=WORKERS, drop_last=True
    )
    while True:
        yield from batches


def batches_of(options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    if options.data == "jpeg":
        yield from loader(options)
    batch = fixed_batch(options)
    while True:
        yield batch


def bare(options: argparse.Namespace) -> None:
    from torch.nn import functional as F

    model, optimizer = make_model(options)
    for images, labels in batches_of(options):
        with autocast(options):
            loss: Any = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def torchvision_reference(options: argparse.Namespace) -> None:
    """The inner loop of references/classification/train.py: it reads the loss in every step."""
    import torch
    from torch.nn import functional as F

    model, optimizer = make_model(options)
    losses, hits, seen = 0.0, 0.0, 0
    for images, labels in batches_of(options):
        with autocast(options):
            logits = model(images)
            loss: Any = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.inference_mode():
            right = logits.topk(5, dim=1).indices == labels[:, None]
        losses += loss.item() * len(labels)
        hits += right[:, 0].sum().item() + right.any(dim=1).sum().item()
        seen += len(labels)


def timm_train(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(options.timm))
    import timm.data

    cuda = ["--amp", "--amp-dtype", "bfloat16", "--channels-last", "--torchcompile"]
    if options.data == "synthetic":
        images, labels = fixed_batch(options)

        class Fixed(list[tuple[Any, Any]]):
            dataset = sampler = batch_sampler = None

            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__([(images, labels)] * (WARM_UP + options.steps + 20))

        timm.data.create_loader = Fixed
    sys.argv = [
        *("train.py", "--data-dir", str(options.folder), "--model", options.model),
        *("--num-classes", str(CLASSES), "--batch-size", str(options.batch)),
        *("--img-size", str(options.size), "--workers", str(WORKERS)),
        *("--device", options.device, *(cuda if options.device == "cuda" else [])),
        *("--opt", "momentum", "--lr", str(LR), "--momentum", str(MOMENTUM)),
        *("--weight-decay", str(DECAY), "--sched", "cosine", "--warmup-epochs", "0"),
        *("--smoothing", "0", "--color-jitter", "0", "--train-interpolation", "bilinear"),
        *("--epochs", "100", "--output", str(options.folder / "timm-output")),
        *(["--no-prefetcher"] if options.device == "cpu" else []),  # as its own help says
    ]
    runpy.run_path(str(options.timm / "train.py"), run_name="__main__")


def trainyard(options: argparse.Namespace) -> None:
    import torch
    from rich.console import Console

    from trainyard.config import load_recipe
    from trainyard.data.batch import Batch
    from trainyard.data.device.feed import TrainingFeed
    from trainyard.run import trainer as run
    from trainyard.world import World

    recipe = options.folder / "loop.toml"
    recipe.write_text("")
    config = load_recipe(
        str(recipe),
        {
            "data.train": str(options.folder / "train"),
            "data.val": str(options.folder / "val"),
            "data.image_size": str(options.size),
            "data.threads": str(WORKERS),
            "model.name": options.model,
            "model.channels_last": str(options.device == "cuda").lower(),
            "model.compile": "default" if options.device == "cuda" else "off",
            "batch.precision": "bf16" if options.device == "cuda" else "fp32",
            "optim.lr": str(LR),
            "optim.momentum": str(MOMENTUM),
            "optim.weight_decay": str(DECAY),
            "batch.size": str(options.batch),
            "run.length": f"{WARM_UP + options.steps + 20} steps",
        },
    )
    if options.data == "synthetic":
        images, labels = fixed_batch(options)
        ones = torch.ones(len(labels), device=options.device)
        ids = torch.arange(len(labels))
        batch = Batch(
            ids=ids,
            epochs=torch.zeros_like(ids),
            labels=labels,
            weights=ones,
            images_BCHW=images,
            mixed_labels=labels,
            lam=ones,
        )
        TrainingFeed.__next__ = lambda self: batch  # type: ignore[method-assign]
    folder = options.folder / f"run-{os.getpid()}"
    run.train(config, folder, world=World(), console=Console(quiet=True))


CONTENDERS: dict[str, Callable[[argparse.Namespace], None]] = {
    "bare loop": bare,
    "trainyard": trainyard,
    "timm train.py": timm_train,
    "torchvision reference": torchvision_reference,
}


# --- measuring ---


class Work:
    """Seconds of Trainyard's forward and backward passes and updates."""

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0

    def begin(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def end(self) -> None:
        self.seconds += time.perf_counter() - self._begun

    def watch_passes(self) -> None:
        from trainyard.training.step import Passes

        passes = Passes._forward_backward

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self.begin()
            result = passes(*arguments, **keywords)
            self.end()
            return result

        Passes._forward_backward = timed  # type: ignore[method-assign]


class Done(BaseException):
    """Enough updates have been timed."""


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of an update of one contender, and its peak memory on a GPU."""
    import torch
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    torch.set_num_threads(options.threads)
    cuda = options.device == "cuda"
    count, started = 0, 0.0
    work = Work()

    def note(*_: Any) -> None:
        nonlocal count, started
        work.end()
        count += 1
        if count in (WARM_UP, WARM_UP + options.steps) and cuda:
            torch.cuda.synchronize()
        if count == WARM_UP:
            started, work.seconds = time.perf_counter(), 0.0
        elif count == WARM_UP + options.steps:
            raise Done

    register_optimizer_step_pre_hook(work.begin)
    register_optimizer_step_post_hook(note)
    if options.contender == "trainyard":
        work.watch_passes()
    try:
        CONTENDERS[options.contender](options)
    except Done:
        seconds = (time.perf_counter() - started) / options.steps
        memory = torch.cuda.max_memory_allocated() if cuda else 0
        is_ours = options.contender == "trainyard" and not cuda
        bookkeeping = seconds - work.seconds / options.steps if is_ours else 0.0
        return {"seconds": seconds, "gigabytes": memory / 1e9, "bookkeeping": bookkeeping}
    raise AssertionError("the loop ended early")


def flops(options: argparse.Namespace) -> float:
    """Floating-point operations of a training step on one image, counted by torch."""
    import timm
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = timm.create_model(options.model, num_classes=CLASSES)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 3, options.size, options.size)).sum().backward()
    return float(counter.get_total_flops()) / 2


Found = dict[str, dict[str, list[float]]]  # by contender and figure, a value a round


def run_rounds(options: argparse.Namespace) -> Found:
    keys = ("seconds", "gigabytes", "bookkeeping")
    found: Found = {name: {key: [] for key in keys} for name in CONTENDERS}
    for number in range(options.rounds):
        order = list(CONTENDERS)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            choice = ["--contender", name, "--model", options.model]
            command = [sys.executable, "-m", "benchmarks.step", *sys.argv[1:], *choice]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise SystemExit(f"{name} failed:\n{result.stderr[-3000:]}")
            figures = json.loads(result.stdout.splitlines()[-1])
            for key, value in figures.items():
                found[name][key].append(value)
            print(f"{options.model}, round {number + 1}: {name}: {figures}", file=sys.stderr)
    return found


def table(found: Found, options: argparse.Namespace) -> str:
    ours = statistics.median(found["trainyard"]["seconds"])
    each = flops(options) if options.peak else 0.0
    lines = [
        "| loop | ms a step: median (min, max) | images a second | trainyard is | MFU | GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in found.items():
        seconds = figures["seconds"]
        median = statistics.median(seconds)
        spread = f"{median * 1e3:.2f} ({min(seconds) * 1e3:.2f}, {max(seconds) * 1e3:.2f})"
        rate = options.batch / median
        mfu = f"{rate * each / options.peak / 1e12:.1%}" if options.peak else ""
        memory = f"{statistics.median(figures['gigabytes']):.1f}" if options.peak else ""
        faster = f"{median / ours:.3f} x"
        lines.append(f"| {name} | {spread} | {rate:,.0f} | {faster} | {mfu} | {memory} |")
    own = statistics.median(found["trainyard"]["bookkeeping"])
    share = f"Bookkeeping: {own * 1e3:.2f} ms of Trainyard's step, {own / ours:.2%}."
    return "\n".join([*lines, *([] if options.device == "cuda" else ["", share])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timm", type=Path, required=True, help="a checkout of timm's repository")
    parser.add_argument("--data", choices=["synthetic", "jpeg"], default="synthetic")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peak", type=float, default=0, help="TFLOP/s of the GPU in bf16")
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-step-DATA.json and .md")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        figures = measure(options)
        sys.stdout.write(f"\n{json.dumps(figures)}\n")
        sys.stdout.flush()
        os._exit(0)  # loaders' processes and the like need no farewell
    if not (options.folder / "train").exists():
        make_images(options.folder)
    load = os.getloadavg()[0]
    found, tables = {}, []
    for model in options.models:
        options.model = model
        found[model] = run_rounds(options)
        tables.append(f"## {model}\n\n{table(found[model], options)}\n")
        print(tables[-1])
    names = ("data", "device", "size", "batch", "steps", "threads", "rounds", "hardware")
    about = {"date": date.today().isoformat()} | {name: getattr(options, name) for name in names}
    about["load_before_and_after"] = [round(load, 1), round(os.getloadavg()[0], 1)]
    if options.hardware:
        heading = f"# Steps, {options.data} data\n\n{listed(about)}\n\n"
        name = f"{options.hardware}-step-{options.data}"
        save(name, about | {"rounds": found}, heading + "\n".join(tables))


if __name__ == "__main__":
    main()
