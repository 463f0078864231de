"""Loading of weights into another model: converts names and resamples sizes."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
WITHOUT_CLASSIFIER = "the classifier is reinitialised: "
"""Beginning of the sentence in a log that gives the reason."""


@dataclass(frozen=True)
class Misfits:
    """Names of weights that differ from a model's."""

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)


def adapt_weights(
    model: nn.Module, source: LoadedWeights, *, classes: Sequence[str], name: str, prefix: str = ""
) -> list[str]:
    """Load the weights of `source` into a timm model, `name`. Returns a log, as sentences.

    Names of the original programs become timm's. Position embeddings and tables are resampled to
    the model's grid, the stem to its kernel; a stem for RGB is adapted to other channels. The
    classifier is left out if the source has other classes than `classes`, or another number of
    them. All else must fit exactly, or a CheckpointError lists the misfits, and the model stays
    unchanged.
    """
    own = model.state_dict()
    weights, done = without_prefix(source, prefix, set(own))
    classifier = _classifier(model)
    rest = {key: tensor for key, tensor in own.items() if key not in classifier}
    if _misfits(rest, {k: w for k, w in weights.items() if k not in classifier}):
        weights = _converted(weights, model, name, done)
        _fit_channels(weights, model, own, done, about=source.about)
        _resample_stem(weights, model, own, done)
    _fit_classifier(weights, own, classifier, done, there=source.classes, here=classes)
    expected = rest if not any(key in weights for key in classifier) else own
    misfits = _misfits(expected, weights)
    if misfits:
        what = _complaint(misfits, expected, weights)
        raise CheckpointError(
            f"{source.about}: does not fit the model; {what}; wrong model.name ({name})?"
        )
    loaded = {k: w for k, w in weights.items() if k in own and w.shape == own[k].shape}
    model.load_state_dict(loaded, strict=False)
    odd = sorted({key.rpartition(".")[2] for key in set(expected) ^ set(weights)})
    if odd:
        done.append(f"{', '.join(odd)}: in one of the two only, which does no harm")
    return [f"began with {len(loaded)} of {len(own)} tensors from {source.about}", *done]


def _misfits(own: dict[str, Tensor], weights: Weights) -> Misfits:
    def matters(name: str) -> bool:
        return name.rpartition(".")[2] not in _HARMLESS

    both = [name for name in own if name in weights and matters(name)]
    return Misfits(
        missing=[name for name in own if name not in weights and matters(name)],
        unexpected=[name for name in weights if name not in own and matters(name)],
        reshaped=[name for name in both if own[name].shape != weights[name].shape],
    )


# --- names and sizes ---


def _converted(weights: Weights, model: nn.Module, name: str, done: list[str]) -> Weights:
    """Apply timm's own conversion of published checkpoints of the model, if it has one."""
    convert = _conversion(name)
    if convert is None:
        return dict(weights)
    try:
        with warnings.catch_warnings(action="ignore"):  # from timm itself
            converted = convert(dict(weights), model)
    except Exception:  # the checkpoint of another model, with names unknown to timm
        return dict(weights)
    renamed = sum(key not in weights for key in converted)
    if renamed:
        done.append(f"gave {renamed} tensors timm's names")
    both = [key for key in converted if key in weights]
    _tell_sizes(done, {key: weights[key] for key in both}, converted)
    return converted


def _conversion(name: str) -> Callable[[Weights, nn.Module], Weights] | None:
    """timm's conversion of a downloaded checkpoint; timm has no public way to get it."""
    if is_own(name):
        return None
    import timm
    from timm.models import _builder

    asked: dict[str, Any] = {}
    load_pretrained = _builder.load_pretrained
    _builder.load_pretrained = lambda model, **options: asked.update(options)
    try:
        with torch.device("meta"):
            timm.create_model(name, pretrained=True)
    finally:
        _builder.load_pretrained = load_pretrained
    return asked.get("filter_fn")


def _fit_channels(
    weights: Weights, model: nn.Module, own: dict[str, Tensor], done: list[str], *, about: str
) -> None:
    """Adapt first convolutions for RGB to other channels as timm does: by their sum for one
    channel, else by repeating them, scaled to the same sum. CheckpointError for others.
    """
    from timm.models import adapt_input_conv

    for key in _stem(weights, model, own):
        there, here = weights[key], own[key]  # out, in, height, width
        if there.shape[1] == here.shape[1]:
            continue
        if there.shape[1] != 3:
            raise CheckpointError(
                f"{about}: takes images of {there.shape[1]} channels, not {here.shape[1]}: set "
                "data.channels to that; only weights for 3 channels are adapted to others"
            )
        weights[key] = adapt_input_conv(here.shape[1], there)
        done.append(f"adapted {key} from 3 channels to {here.shape[1]}")


def _stem(weights: Weights, model: nn.Module, own: dict[str, Tensor]) -> list[str]:
    """Names of the weights of the model's first convolutions, where both sides have them."""
    first: Any = getattr(model, "pretrained_cfg", {}).get("first_conv")
    layers = (first,) if isinstance(first, str) else first or ()
    names = [f"{layer}.weight" for layer in layers]
    both = [name for name in names if name in weights and name in own]
    return [name for name in both if weights[name].ndim == own[name].ndim == 4]


def _resample_stem(
    weights: Weights, model: nn.Module, own: dict[str, Tensor], done: list[str]
) -> None:
    """Resample the first convolution to the model's kernel size (FlexiViT, Beyer et al. 2023)."""
    from timm.layers import resample_patch_embed

    for key in _stem(weights, model, own):
        there, here = weights[key], own[key]  # out, in, height, width
        if there.shape[:2] == here.shape[:2] and there.shape != here.shape:
            weights[key] = resample_patch_embed(there, list(here.shape[2:]))
            _tell_sizes(done, {key: there}, weights)


def _tell_sizes(done: list[str], before: Weights, after: Weights) -> None:
    changed = [key for key in before if before[key].shape != after[key].shape]
    for key in changed[:_SHOWN]:
        done.append(f"resampled {key} from {_size(before[key])} to {_size(after[key])}")
    if len(changed) > _SHOWN:
        done.append(f"resampled {len(changed) - _SHOWN} more")


# --- the classifier ---


def _classifier(model: nn.Module) -> list[str]:
    """Names of the classifier's tensors; two layers in models with a distillation token.

    None in a model of the user that has no get_classifier().
    """
    layers: Any = getattr(model, "get_classifier", tuple)()
    layers = layers if isinstance(layers, (tuple, list, nn.ModuleList)) else (layers,)
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if any(module is layer for layer in layers)
        for key in module.state_dict()
    ]


def _fit_classifier(
    weights: Weights,
    own: dict[str, Tensor],
    classifier: list[str],
    done: list[str],
    *,
    there: list[str] | None,
    here: Sequence[str],
) -> None:
    """Keep the classifier, sort its rows into the order of the classes `here`, or leave it out."""
    held = [key for key in classifier if key in weights]
    if not classifier:
        return
    if len(held) < len(classifier):
        reason = "there is none in it"
    elif any(weights[key].shape[:1] != own[key].shape[:1] for key in held):
        reason = f"it is for {len(weights[held[0]]):,} classes, not {len(here):,}"
    elif there is None or there == list(here):
        return
    elif sorted(there) == sorted(here):
        place = {name: row for row, name in enumerate(there)}
        order = torch.tensor([place[name] for name in here])
        weights |= {key: weights[key][order] for key in held}
        done.append("put the classifier's rows into the order of the classes here")
        return
    else:
        reason = "it is for other classes"
    for key in held:
        del weights[key]
    done.append(f"{WITHOUT_CLASSIFIER}{reason}")


# --- messages about misfits ---


def _complaint(misfits: Misfits, own: dict[str, Tensor], weights: Weights) -> str:
    sizes = [f"{n} ({_size(weights[n])}, not {_size(own[n])})" for n in misfits.reshaped]
    groups = {
        "missing": misfits.missing,
        "unexpected": misfits.unexpected,
        "of another shape": sizes,
    }
    return "; ".join(
        f"{len(names):,} {what}: {_list(names)}" for what, names in groups.items() if names
    )


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
