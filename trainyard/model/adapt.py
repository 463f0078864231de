"""Loading of weights into another model; timm converts their names and sizes."""

import logging
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainyard.errors import CheckpointError
from trainyard.model.weights import LoadedWeights, Weights, without_prefix
from trainyard.own_code import is_own

# Buffers that a model computes by itself, or counters: some programs save them, some do not.
_HARMLESS = (
    "num_batches_tracked",
    "relative_position_index",
    "relative_coords_table",
    "attn_mask",
)
_SHOWN = 2


class Adapted(NamedTuple):
    log: list[str]
    """How weights were adapted, as sentences."""
    why_other_classifier: str | None
    """Why the classifier is not the source's own; None if it is."""


def adapt_weights(
    model: nn.Module, source: LoadedWeights, *, classes: Sequence[str], name: str, prefix: str = ""
) -> Adapted:
    """Load the weights of `source` into a timm model, `name`.

    Weights that do not fit are converted by timm: names of the original programs, position
    embeddings and tables of another grid, a stem for other channels. The classifier keeps the rows
    of classes that are in the source and in `classes`; new ones stay as the model has them. All
    else must fit exactly, or a CheckpointError lists the misfits, and the model stays unchanged.
    """
    tensors = model.state_dict()
    weights, log = without_prefix(source, prefix, set(tensors))
    classifier = classifier_keys(model)
    rest = {key: tensor for key, tensor in tensors.items() if key not in classifier}
    if _misfits(rest, {key: w for key, w in weights.items() if key not in classifier}):
        weights = _converted(weights, model, name, classifier, log=log)
        if source.is_ordered and _misfits(tensors, weights):
            weights = _named_by_order(weights, tensors, classifier, log)
    why = _fit_classifier(weights, tensors, classifier, log, theirs=source.classes, ours=classes)
    expected = tensors if any(key in weights for key in classifier) else rest
    if misfits := _misfits(expected, weights):
        raise CheckpointError(
            "weights.do-not-fit",
            "{source}: does not fit the model; {reason}; wrong model.name ({name}) or "
            "data.channels?",
            source=source.description,
            reason=misfits,
            name=name,
        )
    loaded = {k: w for k, w in weights.items() if k in tensors and w.shape == tensors[k].shape}
    model.load_state_dict(loaded, strict=False)
    learned = [key for key in tensors if not key.endswith(_HARMLESS)]
    count = sum(key in loaded for key in learned)
    began = f"began with {count} of {len(learned)} tensors from {source.description}"
    return Adapted([began, *log], why)


# --- names and sizes ---


def _converted(
    weights: Weights, model: nn.Module, name: str, classifier: list[str], *, log: list[str]
) -> Weights:
    """The weights as timm loads them into such a model; unchanged if it cannot."""
    if is_own(name):
        return weights
    import timm

    heads = [*classifier, "head.weight", "fc.weight", "classifier.weight"]  # timm's, and others'
    rows = next((len(weights[key]) for key in heads if key in weights), 0)
    options = {**getattr(model, "_model_args", {}), "num_classes": rows}
    overlay = {"state_dict": dict(weights), "num_classes": rows}
    try:
        with torch.random.fork_rng(devices=[]), _strictly():
            model = timm.create_model(
                name, pretrained=True, pretrained_cfg_overlay=overlay, **options
            )
    except Exception:  # the weights of another model: their own names make the better message
        return weights
    converted = model.state_dict()
    if renamed := sum(key not in weights for key in converted):
        log.append(f"gave {renamed} tensors timm's names")
    both = [key for key in converted if key in weights and not key.endswith(_HARMLESS)]
    sizes = [(key, _size(weights[key]), _size(converted[key])) for key in both]
    changed = [f"{key} from {old} to {new}" for key, old, new in sizes if old != new]
    log += [f"timm fitted {text}" for text in changed[:_SHOWN]]
    if len(changed) > _SHOWN:
        log.append(f"timm fitted {len(changed) - _SHOWN} more")
    return converted


def _named_by_order(
    weights: Weights, tensors: dict[str, Tensor], classifier: list[str], log: list[str]
) -> Weights:
    """The weights under the model's names, if both are one list of kinds and shapes.

    The kind is the end of a name, such as running_mean. The classifier may have other rows. Else
    the weights are returned unchanged.
    """
    theirs, ours = (
        [name for name in names if not name.endswith(_HARMLESS)] for names in (weights, tensors)
    )
    fits = len(theirs) == len(ours) and all(
        their.rpartition(".")[2] == our.rpartition(".")[2]
        and weights[their].shape[our in classifier :] == tensors[our].shape[our in classifier :]
        for their, our in zip(theirs, ours, strict=True)
    )
    if not fits:
        return weights
    log.append(
        f"gave {len(ours)} tensors timm's names by their order and shapes, from {theirs[0]} to "
        f"{ours[-1]}: check the accuracy, if the model may have its layers in another order"
    )
    return {our: weights[their] for their, our in zip(theirs, ours, strict=True)}


@contextmanager
def _strictly() -> Iterator[None]:
    """Inside, weights that timm leaves out or does not find are an error, not a line of its log."""

    def refuse(record: logging.LogRecord) -> bool:
        if record.levelno > logging.INFO or record.getMessage().startswith("Missing keys"):
            raise ValueError(record.getMessage())
        return False

    logger = logging.getLogger("timm.models._builder")
    level = logger.level
    logger.addFilter(refuse)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(action="ignore"):  # of timm's conversions
            yield
    finally:
        logger.removeFilter(refuse)
        logger.setLevel(level)


# --- the classifier ---


def classifier_layers(model: nn.Module) -> list[nn.Module]:
    """The classifier's layers: one, or two in models with a distillation token.

    None in a model of the user that has no get_classifier().
    """
    layers: Any = getattr(model, "get_classifier", tuple)()
    return list(layers) if isinstance(layers, (tuple, list, nn.ModuleList)) else [layers]


def classifier_keys(model: nn.Module) -> list[str]:
    """Names of the tensors of its layers."""
    layers = classifier_layers(model)
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if any(module is layer for layer in layers)
        for key in module.state_dict()
    ]


def _fit_classifier(
    weights: Weights,
    tensors: dict[str, Tensor],
    classifier: list[str],
    log: list[str],
    *,
    theirs: Sequence[str] | None,
    ours: Sequence[str],
) -> str | None:
    """Make the classifier that of the classes `ours`: of each that the source names, its rows.

    Returns why it is not the source's own; it is left out if no class is in both.
    """
    held = [key for key in classifier if key in weights]
    if not classifier:
        return None
    shared: dict[str, int] = {}
    if len(held) < len(classifier):
        reason = "there is none in it"
    else:
        rows, reason = len(weights[held[0]]), "it is for other classes"
        if any(weights[key].shape[:1] != tensors[key].shape[:1] for key in held):
            reason = f"it is for {rows:,} classes, not {len(ours):,}"
        elif theirs is None or list(theirs) == list(ours):
            return None
        names = _names_of_rows(rows, ours) if theirs is None else theirs
        if all(
            len(weights[key]) == len(names) and weights[key].shape[1:] == tensors[key].shape[1:]
            for key in held
        ):
            shared = {name: row for row, name in enumerate(names) if name in set(ours)}
    if not shared:
        log.append(f"the classifier is reinitialised: {reason}")
        for key in held:
            del weights[key]
        return reason
    here = [row for row, name in enumerate(ours) if name in shared]
    for key in held:
        of_source, weights[key] = weights[key], tensors[key].clone().to(weights[key])
        weights[key][here] = of_source[[shared[ours[row]] for row in here]]
    log.append(_kept(rows, shared, ours))
    return None if len(shared) == len(ours) == len(theirs or ()) else reason


def _kept(rows: int, shared: Collection[str], ours: Sequence[str]) -> str:
    """A sentence about the classes that kept their rows."""
    new = [name for name in ours if name not in shared]
    if not new and len(shared) == rows:
        return "put the classifier's rows into the order of the classes here"
    return (
        f"the classifier keeps its rows of {len(shared):,} classes by their names; {len(new):,} "
        f"are new{_listed(new)}, and {rows - len(shared):,} of the source are left out"
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f" ({shown}{', …' * (len(names) > _SHOWN)})" if names else ""


def _names_of_rows(rows: int, ours: Sequence[str]) -> list[str]:
    """Names of the rows of a classifier of ImageNet's size: synsets or words, whichever `ours` has.

    A name of several rows is that of none.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": rows})
    if subset is None:
        return []
    info = ImageNetInfo(subset)
    synsets = [info.index_to_label_name(number) for number in range(rows)]
    words = [info.index_to_description(number).partition(",")[0] for number in range(rows)]
    best = max((synsets, words), key=lambda names: len(set(names).intersection(ours)))
    counts = Counter(best)
    return [name if counts[name] == 1 else "" for name in best]


# --- messages ---


def _misfits(wanted: dict[str, Tensor], weights: Weights) -> str:
    """A list of the weights that differ from a model's, by name or shape; empty if all fit."""
    wanted, weights = (
        {name: tensor for name, tensor in tensors.items() if not name.endswith(_HARMLESS)}
        for tensors in (wanted, weights)
    )
    sizes = {
        name: (_size(weights[name]), _size(wanted[name])) for name in wanted if name in weights
    }
    groups = {
        "missing": [name for name in wanted if name not in weights],
        "unexpected": [name for name in weights if name not in wanted],
        "of another shape": [f"{n} ({a}, not {b})" for n, (a, b) in sizes.items() if a != b],
    }
    return "; ".join(
        f"{len(names):,} {what}: {', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)}"
        for what, names in groups.items()
        if names
    )


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
