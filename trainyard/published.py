"""A classifier without a run: a model of timm with published weights, timm's own or a file's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainyard.classifier import Classifier
from trainyard.config import RunConfig, override
from trainyard.errors import CheckpointError
from trainyard.image_size import as_size
from trainyard.model.adapt import adapt_weights, classifier_keys, why_without_classifier
from trainyard.model.build import check_name
from trainyard.model.weights import LoadedWeights, pixels_in
from trainyard.run.build import build_run_model
from trainyard.run.pretrained import Beginning, initial_source, with_pixels
from trainyard.world import World, pick_device


def load_published(
    name: str,
    checkpoint: str | Path | None = None,
    *,
    device: "torch.device | str | None" = None,
    overrides: Mapping[str, str] | None = None,
) -> tuple[Classifier, list[str]]:
    """The classifier of a timm model with published weights, and how they were adapted.

    `checkpoint`: a file of weights; by default timm's own, from its cache or the Hub. Images are
    prepared as the file or a config.json beside it says, else as timm notes for the model.
    `overrides` of recipe keys: {"data.eval_size": "288"}. Classes have the file's names, or
    ImageNet's where their number is that of one of its sets. CheckpointError if the weights cannot
    be read, do not fit or have no classifier.
    """
    import timm

    check_name(name)
    cfg = timm.get_pretrained_cfg(name)
    noted: dict[str, Any] = asdict(cfg) if cfg is not None else {}
    config = override(RunConfig(), _keys(name, checkpoint, noted) | dict(overrides or {}))
    source = initial_source(config.model)
    pixels = pixels_in(noted) | source.pixels
    config = with_pixels(config, Beginning(source.about, pixels=pixels))
    num_classes = _num_classes(config, source, noted)
    classes, remarks = source.classes, list[str]()
    if classes is None:
        classes, remarks = _imagenet_names(num_classes)
    model, log = _adapted(config, source, classes)
    place = pick_device(World()) if device is None else torch.device(device)
    classifier = Classifier(
        model=model.to(place).eval().requires_grad_(False),
        classes=tuple(classes),
        recipe=config,
        config=config,
        checkpoint=Path(checkpoint) if checkpoint else None,
        has_lists=False,
        step=0,
        weights="",
        device=place,
    )
    return classifier, [*log, *remarks]


def _adapted(
    config: RunConfig, source: LoadedWeights, classes: Sequence[str]
) -> tuple[nn.Module, list[str]]:
    """The model with these weights, and how they were adapted."""
    model = build_run_model(config, len(classes))
    log = adapt_weights(model, source, classes=classes, name=config.model.name)
    if reason := why_without_classifier(log):
        raise CheckpointError("weights.classifier-unusable", source=source.about, reason=reason)
    return model, log


def _keys(name: str, checkpoint: str | Path | None, noted: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe keys for a model, with the size of images that timm notes for it."""
    keys: dict[str, Any] = {"model.name": name, "model.checkpoint": str(checkpoint or "timm")}
    if size := noted.get("test_input_size") or noted.get("input_size"):
        keys["data.image_size"] = as_size(*size[1:])
    return keys


def _num_classes(config: RunConfig, source: LoadedWeights, noted: Mapping[str, Any]) -> int:
    """Rows of the classifier: by the names of classes, by its weights, or as timm notes it."""
    if source.classes:
        return len(source.classes)
    with torch.device("meta"):
        model = build_run_model(config, noted.get("num_classes") or 1000)
    held = [key for key in classifier_keys(model) if key in source.weights]
    return len(source.weights[held[0]]) if held else int(noted.get("num_classes") or 1000)


def _imagenet_names(num_classes: int) -> tuple[list[str], list[str]]:
    """Names of the classes of ImageNet's set with so many, or else their numbers; and a remark.

    Names that stand for several classes, such as crane, have the synset beside them.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": num_classes})
    if subset is None:
        return [str(number) for number in range(num_classes)], ["no names of classes are known"]
    info = ImageNetInfo(subset)
    names = [info.index_to_description(number).partition(",")[0] for number in range(num_classes)]
    counts = Counter(names)
    names = [
        name if counts[name] == 1 else f"{name} ({info.index_to_label_name(number)})"
        for number, name in enumerate(names)
    ]
    return names, [f"{num_classes:,} classes are taken for those of {subset}"]
