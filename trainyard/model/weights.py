"""Sources of initial weights: files of other programs, and timm's pretrained weights."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.errors import CheckpointError
from trainyard.files import why_unreadable
from trainyard.model.catalogue import is_hub_unknown, not_downloaded
from trainyard.model.config import PIXELS
from trainyard.model.torch_file import read_torch_file
from trainyard.own_code import is_own
from trainyard.pickle_records import Record

Weights = dict[str, Tensor]
Pixels = dict[str, Any]
"""Keys of [data], without the section, with the values that weights were trained with."""

# Entries with weights in checkpoints, averaged ones first: timm, ConvNeXt and DeiT, others.
KEYS = ("state_dict_ema", "model_ema", "model", "state_dict", "module")
# Prefixes that wrappers add to names: DDP, torch.compile, Lightning and Colossal-AI, decent-dp.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "_model.")

CROP_MODES = {"crop": "center", "squash": "squash", "pad": "border"}
"""timm's crop_mode for each `data.fit`."""


@dataclass(frozen=True)
class LoadedWeights:
    weights: Weights
    description: str
    """A description for users: "model.pth, entry 'model_ema'"."""
    classes: list[str] | None = None
    """Names of the classifier's rows, if known."""
    is_ordered: bool = False
    """True if they are in the order of the model's layers; a .safetensors file sorts them."""
    noted: Mapping[str, Any] = field(default_factory=dict)
    """How they were made: the header of an export, a configuration of timm or a run's [data]."""

    @property
    def pixels(self) -> Pixels:
        """How images were prepared for these weights, as far as known."""
        return pixels_in(self.noted)


def pixels_in(values: Mapping[str, Any]) -> Pixels:
    """The preparation of images in a configuration of timm, a file's header or a [data] section."""
    known = {key: values[key] for key in PIXELS if values.get(key) is not None}
    fits = [fit for fit, mode in CROP_MODES.items() if mode == values.get("crop_mode")]
    return known | ({"fit": fits[0]} if fits else {})


def read_weights(path: Path, key: str | None = None) -> LoadedWeights:
    """The weights of a .safetensors file or a torch file, of which `key` names the entry.

    Classes and pixels are known for exported files. No code in a file is run. CheckpointError if
    the file cannot be read or holds no weights.
    """
    if path.suffix == ".safetensors":
        content: Any = _read_safetensors(path)
    else:
        content = _read_torch(path)
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            raise CheckpointError(
                "weights.no-such-entry",
                "model.checkpoint_key: {path} has no {entry!r}{hint}",
                path=path,
                entry=key,
                hint=_entries(content),
            )
        if not _are_weights(content[key]):
            raise CheckpointError(
                "weights.entry-without-weights",
                "model.checkpoint_key: {entry!r} of {path} holds no weights",
                entry=key,
                path=path,
            )
        return LoadedWeights(_tensors(content[key]), f"{path}, entry {key!r}", is_ordered=True)
    if _are_weights(content):
        is_sorted = path.suffix == ".safetensors"
        header = _header(path) if is_sorted else {}
        return LoadedWeights(
            _tensors(content),
            str(path),
            _names(header.get("classes")),
            is_ordered=not is_sorted,
            noted=header,
        )
    for name in KEYS:
        if isinstance(content, Mapping) and _are_weights(content.get(name)):
            return LoadedWeights(
                _tensors(content[name]), f"{path}, entry {name!r}", is_ordered=True
            )
    raise CheckpointError(
        "weights.none-in-file",
        "{path}: no weights found; name their entry with model.checkpoint_key{hint}",
        path=path,
        hint=_entries(content),
    )


def pretrained_weights(
    name: str, *, key: str = "model.checkpoint", value: str = "timm"
) -> LoadedWeights:
    """timm's pretrained weights of a model; CheckpointError if there are none.

    `key` and its value `value` are what the recipe says.
    """
    import timm

    if is_own(name):
        raise CheckpointError(
            "weights.not-in-timm",
            "{key} = {value!r}: timm has no weights of {name}: name a file of weights",
            key=key,
            value=value,
            name=name,
        )
    try:
        with torch.random.fork_rng(devices=[]), _offline_without_names():
            model: Any = timm.create_model(name, pretrained=True)
    except Exception as error:  # from any library between here and the hub
        raise not_downloaded(name, key, value, why_unreadable(error)) from error
    tag = model.pretrained_cfg.get("tag", "")
    full = name if not tag or name.endswith(f".{tag}") else f"{name}.{tag}"
    return LoadedWeights(model.state_dict(), f"timm's {full}", noted=model.pretrained_cfg)


@contextmanager
def _offline_without_names() -> Iterator[None]:
    """Inside, the hub's client uses its cache alone if no name of its server can be resolved.

    It would otherwise try again for minutes.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = is_hub_unknown()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def without_prefix(
    source: LoadedWeights, prefix: str, names: set[str]
) -> tuple[Weights, list[str]]:
    """Weights under a model's names (`names`), and a log of the changes to names.

    Weights whose names lack `prefix` are left out. Prefixes of wrappers are removed automatically.
    """
    weights, done = dict(source.weights), []
    if prefix:
        weights = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        if not weights:
            raise CheckpointError(
                "weights.no-such-prefix",
                "model.checkpoint_prefix: no name in {source} begins with {prefix!r}; the first "
                "is {first!r}",
                source=source.description,
                prefix=prefix,
                first=next(iter(source.weights)),
            )
        others = len(source.weights) - len(weights)
        done.append(f"took {prefix!r} off {len(weights)} names, left {others} others out")
    # Prefixes of wrappers: all names have them, and none of the model's.
    known = [each for each in _WRAPPERS if not any(name.startswith(each) for name in names)]
    while weights and (common := [w for w in known if all(name.startswith(w) for name in weights)]):
        weights = {name.removeprefix(common[0]): weight for name, weight in weights.items()}
        done.append(f"took {common[0]!r} off all names")
    return weights, done


# --- reading ---


def _read_safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError("file.unreadable", path=path, reason=str(error)) from None


def _header(path: Path) -> dict[str, Any]:
    """Values in the header of a .safetensors file, as `trainyard export` writes them."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {key: _value(text) for key, text in (file.metadata() or {}).items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _names(value: Any) -> list[str] | None:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return list(value) if is_list else None


def _read_torch(path: Path) -> Any:
    try:
        return read_torch_file(path)
    except Exception as error:  # a damaged file raises many kinds of errors
        raise CheckpointError("file.unreadable", path=path, reason=why_unreadable(error)) from None


def _are_weights(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
        and all(isinstance(weight, Tensor) for weight in value.values())
    )


def _tensors(value: Mapping[str, Tensor]) -> Weights:
    # torch's AveragedModel keeps this counter beside the weights; models do not have it.
    return {name: weight for name, weight in value.items() if name != "n_averaged"}


def _entries(content: Any) -> str:
    if not isinstance(content, Mapping):
        kind = content.name if isinstance(content, Record) else type(content).__name__
        return f"; it is a {kind}"
    names = [str(name) for name in content]
    return f"; it has {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
