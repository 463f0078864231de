"""The head of a run: what it trains, on which data, for how long, and what may be amiss."""

import math
from collections.abc import Iterator

import torch
from torch import nn

from trainyard.config import RunConfig
from trainyard.course import Course
from trainyard.data.decode.rendering import written
from trainyard.data.open_datasets import (
    Datasets,
    data_remarks,
    slow_paths,
    source_of,
    what_is_left_out,
    what_is_lost,
)
from trainyard.image_size import height_width
from trainyard.model.weights import pixels_in
from trainyard.monitor.history import METRICS
from trainyard.monitor.reports import Report
from trainyard.printable import epochs_in_all, how_many, in_millions
from trainyard.run.pretrained import InitialWeights
from trainyard.world import World, usable_cores

_FEW_STEPS = 10
_FEW_IMAGES = 100  # for which the 95% interval of an accuracy reaches 10 points up and down


def run_summary(
    config: RunConfig,
    data: Datasets,
    course: Course,
    *,
    model: nn.Module,
    initial: InitialWeights,
    world: World,
    device: torch.device,
    step: int,
) -> Iterator[Report]:
    """The head as an event with rows of text by name, and its remarks as warnings.

    `step`: the number of steps that are done, if the run goes on.
    """
    rows = {
        "device": _device(config, world, device),
        "model": _model(config, model, initial),
        "images": _images(config, course, initial),
        "classes": _classes(data.train.classes),
        **_splits(config, data, course),
        "batch": _batch(course, world),
        "length": _length(config, course),
        **({"goes on": f"after step {step:,} of {course.num_steps:,}"} if step else {}),
    }
    message = f"{config.model.name}, {course.num_steps:,} steps"
    yield {"kind": "event", "event": "head", "message": message, "rows": rows}
    for text in _remarks(config, data, course, initial):
        yield {"kind": "event", "event": "remark", "level": "warning", "message": text}


def _device(config: RunConfig, world: World, device: torch.device) -> str:
    name = f"CPU, {how_many(usable_cores(), 'core')}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    nodes = f" on {world.num_nodes} nodes" if world.num_nodes > 1 else ""
    return f"{name}; {how_many(world.size, 'rank')}{nodes}; {config.batch.precision}"


def _model(config: RunConfig, model: nn.Module, initial: InitialWeights) -> str:
    weights = [*model.parameters()]
    frozen = sum(weight.numel() for weight in weights if not weight.requires_grad)
    size = f"{in_millions(sum(weight.numel() for weight in weights))} parameters"
    size += f", {in_millions(frozen)} of them frozen" if frozen else ""
    return f"{config.model.name}, {size}, from {initial.description or 'scratch'}"


def _images(config: RunConfig, course: Course, initial: InitialWeights) -> str:
    pixels, data = pixels_in(config.data.model_dump()), config.data
    sizes = dict.fromkeys(height_width(phase.image_size) for phase in course.phases)
    shape = ", ".join(f"{height} x {width}" for height, width in sizes)
    kind = {1: "grey", 3: "RGB"}.get(data.channels, f"{data.channels} channels")
    mean, std = (" ".join(f"{value:.3g}" for value in pixels[key]) for key in ("mean", "std"))
    is_theirs = (
        initial.log and initial.pixels and not _differences(config, initial, tuple(initial.pixels))
    )
    size = height_width(data.eval_size or data.image_size)
    limits = f", {written(data.rendering.range)} to 8 bits" if data.rendering.range else ""
    evaluated = "" if [*sizes] == [size] else f" (evaluated at {size[0]} x {size[1]})"
    return (
        f"{shape}{evaluated}, {kind}{limits}; mean {mean}, std {std}, {data.interpolation}, "
        f"{data.fit} {data.crop_pct:g}"
        f"{', as the weights had them' if is_theirs else ''}"
    )


def _differences(config: RunConfig, initial: InitialWeights, keys: tuple[str, ...]) -> list[str]:
    """The `keys` whose values differ from those that the weights were trained with."""
    ours, theirs = pixels_in(config.data.model_dump(mode="json")), initial.pixels
    plain = {key: [*of] if isinstance(of, tuple) else of for key, of in theirs.items()}
    return [key for key in keys if key in ours and plain.get(key, ours[key]) != ours[key]]


def _classes(names: tuple[str, ...]) -> str:
    shown = names if len(names) <= 4 else (*names[:3], f"\N{HORIZONTAL ELLIPSIS} {names[-1]}")
    return f"{len(names):,}: {', '.join(shown)}"


def _splits(config: RunConfig, data: Datasets, course: Course) -> dict[str, str]:
    """Images and locations of both splits, and how they were divided."""
    train, val = source_of(config.data, "train"), source_of(config.data, "val")
    epoch = course.epoch_samples
    drawn = "" if epoch == len(data.train) else f", of which an epoch draws {epoch:,}"
    if val.side is not None:
        share = f"{val.side.key} = {val.side.part} of {_locations(val.locations)}"
    else:
        share = _locations(val.locations)
    return {
        "train": f"{how_many(len(data.train), 'image')}: {_locations(train.locations)}{drawn}",
        "validate": f"{how_many(len(data.val), 'image')}: {share}",
    }


def _locations(locations: str | tuple[str, ...] | None) -> str:
    first, *rest = (locations,) if isinstance(locations, str) else locations or ("",)
    return f"{first} and {how_many(len(rest), 'other')}" if rest else first


def _batch(course: Course, world: World) -> str:
    batches = [*dict.fromkeys(phase.batch for phase in course.phases)]
    text = f"{', later '.join(f'{batch:,}' for batch in batches)} images"
    if world.size > 1:
        text += f", {batches[0] / world.size:,.4g} on each rank"
    return text


def _length(config: RunConfig, course: Course) -> str:
    warmup = math.ceil(course.at(config.schedule.warmup))
    rise = f", the first {warmup:,} of warm-up" if warmup else ""
    if warmup >= course.num_steps:
        rise = f", all of a warm-up of {how_many(warmup, 'step')}"
    epochs = epochs_in_all(float(course.epochs(course.length)))
    texts = [f"{epochs} epoch{'s' * (epochs != '1')}", how_many(course.num_steps, "step")]
    first, second = reversed(texts) if "step" in course.length else texts
    end = ""
    if patience := config.run.patience:
        better = f"a better {METRICS[config.run.best_by]}"
        end = f"; fewer after {how_many(patience, 'evaluation')} without {better}"
    return f"{first} ({second}{rise}){end}"


def _remarks(
    config: RunConfig, data: Datasets, course: Course, initial: InitialWeights
) -> Iterator[str]:
    yield from slow_paths(data.train, data.val)
    yield from what_is_left_out([data.train, data.val])
    yield from what_is_lost(data.train, data.val)
    yield from data_remarks(config.data, data)
    for key in _differences(config, initial, ("mean", "std")):
        yield (
            f"{initial.description} had data.{key} = {list(initial.pixels[key])} in its training, "
            f"and the recipe sets {list(getattr(config.data, key))}"
        )
    batch, images = max(phase.batch for phase in course.phases), course.epoch_samples
    if batch > images:
        yield (
            f"a batch of {batch:,} is {batch / images:.3g} passes over the "
            f"{how_many(images, 'image')} of an epoch: take a smaller batch.size"
        )
    steps, warmup = course.num_steps, math.ceil(course.at(config.schedule.warmup))
    if warmup >= steps:
        yield (
            f"the warm-up is {warmup:,} steps, and the run {steps:,}: take a shorter "
            "schedule.warmup"
        )
    if steps < _FEW_STEPS:
        yield f"{how_many(steps, 'step')} in all: take a longer run.length, or a smaller batch.size"
    if len(data.val) < _FEW_IMAGES:
        points = 196 * (0.25 / max(len(data.val), 1)) ** 0.5
        yield (
            f"{how_many(len(data.val), 'validation image')}: an accuracy of 50% is known to "
            f"within {points:.0f} points (95%)"
        )
