"""A classifier without a run: a model of timm with published weights, timm's own or a file's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainyard.classifier import Classifier
from trainyard.compare import check_keys
from trainyard.config import RunConfig, override
from trainyard.errors import CheckpointError
from trainyard.files import find_checkpoint
from trainyard.image_size import as_size
from trainyard.model.adapt import adapt_weights, classifier_keys
from trainyard.model.catalogue import check_name
from trainyard.model.weights import LoadedWeights, pixels_in
from trainyard.run.model import build_run_model
from trainyard.run.pretrained import InitialWeights, initial_source, with_pixels
from trainyard.world import World, own_device

_OF_MODEL = ("options", "channels_last", "checkpoint_key", "checkpoint_prefix")
# Arguments of timm that need not be equal: they change no score, or weights are adapted to them.
_NOT_COMPARED = (
    *("num_classes", "in_chans", "img_size", "dynamic_img_size", "strict_img_size"),
    *("drop_rate", "drop_path_rate", "drop_block_rate"),
)
_WHAT = "a prediction with published weights, which --model and --checkpoint name"


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
    be read, do not fit, have no classifier or are a run's, RecipeError for a key without effect.
    """
    import timm

    check_keys(overrides or {}, _WHAT, of_model=_OF_MODEL)
    check_name(name)
    if checkpoint is not None:
        _refuse_run(Path(checkpoint))
    cfg = timm.get_pretrained_cfg(name)
    noted: dict[str, Any] = asdict(cfg) if cfg is not None else {}
    keys = {"model.name": name, "model.checkpoint": str(checkpoint or "timm"), **(overrides or {})}
    config, source = _prepared(keys, noted)
    classes, remarks = source.classes, list[str]()
    if classes is None:
        classes, remarks = _imagenet_names(_num_classes(config, source, noted))
    model, log = _adapted(config, source, classes)
    device = own_device(World()) if device is None else torch.device(device)
    classifier = Classifier(
        model=model.to(device).eval().requires_grad_(False),
        classes=tuple(classes),
        recipe=config,
        config=config,
        checkpoint=Path(checkpoint) if checkpoint else None,
        has_lists=source.noted.get("probabilities") == "sigmoid",
        step=0,
        weights="",
        device=device,
    )
    return classifier, [*log, *remarks]


def _adapted(
    config: RunConfig, source: LoadedWeights, classes: Sequence[str]
) -> tuple[nn.Module, list[str]]:
    """The model with these weights, and how they were adapted."""
    model = build_run_model(config, len(classes))
    name, prefix = config.model.name, config.model.checkpoint_prefix
    _check_model(source, name, getattr(model, "_model_args", {}))
    log, reason = adapt_weights(model, source, classes=classes, name=name, prefix=prefix)
    if reason is not None:
        raise CheckpointError(
            "weights.classifier-unusable",
            "{source}: {reason}: it cannot name classes",
            source=source.description,
            reason=reason,
        )
    return model, log


def _check_model(source: LoadedWeights, name: str, arguments: Mapping[str, Any]) -> None:
    """CheckpointError for the export of another model, though its weights may fit."""
    if not isinstance(source.noted.get("model_args"), dict):
        return  # no export
    theirs = _described(source.noted.get("architecture"), source.noted["model_args"])
    ours = _described(name.partition(".")[0], arguments)
    if theirs != ours:
        raise CheckpointError(
            "weights.of-other-model",
            "{source}: is an export of another model ({theirs}) than asked for ({own}): name its "
            "architecture, with --model.options and --data.channels as in its run",
            source=source.description,
            theirs=theirs,
            own=ours,
        )


def _described(architecture: object, arguments: Mapping[str, Any]) -> str:
    compared = {key: arguments[key] for key in sorted(arguments) if key not in _NOT_COMPARED}
    return f"{architecture}, {compared}"


def _refuse_run(path: Path) -> None:
    """CheckpointError for a run, a checkpoint or a file in one: its recipe is needed, too."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir() or (folder / "manifest.json").is_file():
        find_checkpoint(folder)  # another error for any other folder
        raise CheckpointError(
            "weights.of-a-run",
            "{path}: is a run's, and its recipe says how it is used: trainyard predict {folder} "
            "IMAGE",
            path=path,
            folder=folder,
        )


def _prepared(
    overrides: Mapping[str, Any], of_timm: Mapping[str, Any]
) -> tuple[RunConfig, LoadedWeights]:
    """A recipe with the keys of `overrides`, and the weights.

    Images are as is written beside the weights, or else as timm notes for the model.
    """
    model = {key: value for key, value in overrides.items() if key.startswith("model.")}
    source = initial_source(override(RunConfig(), model).model)
    noted, pixels = source.noted if source.pixels else of_timm, pixels_in(of_timm) | source.pixels
    keys = {f"data.{key}": noted[key] for key in ("image_size", "exif") if key in noted}
    if size := noted.get("test_input_size") or noted.get("input_size"):
        keys["data.image_size"] = as_size(*size[1:])
    keys["data.fit"] = pixels.get("fit", "crop")  # of which data.crop_pct is a share
    keys["data.channels"] = len(pixels.get("mean", "RGB"))
    config = override(RunConfig(), keys | dict(overrides))
    test, share = noted.get("test_input_size"), noted.get("test_crop_pct")
    if test and share and as_size(*test[1:]) == (config.data.eval_size or config.data.image_size):
        pixels["crop_pct"] = share
    return with_pixels(config, InitialWeights(source.description, pixels=pixels)), source


def _num_classes(config: RunConfig, source: LoadedWeights, noted: Mapping[str, Any]) -> int:
    """Rows of the classifier: by its weights, or as timm notes it."""
    with torch.device("meta"):
        model = build_run_model(config, noted.get("num_classes") or 1000)
    keys = [f"{config.model.checkpoint_prefix}{key}" for key in classifier_keys(model)]
    held = [key for key in keys if key in source.weights]
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
