"""timm's models: their names, and whether their weights are to be had, without torch or timm."""

import difflib
import os
import re
import socket
import sys
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from trainyard.errors import CheckpointError, RecipeError
from trainyard.hints import as_question, closest
from trainyard.own_code import is_own

_REGISTERED = re.compile(r"^@register_model\s+def (\w+)", re.MULTILINE)
_FORMER = re.compile(
    r"^register_model_deprecations\(__name__, \{(.*?)^\}\)", re.MULTILINE | re.DOTALL
)
_NEAR = 0.8  # of difflib's ratio
_PATIENCE_S = 1.0  # of a person, for a name that may be resolved later


@cache
def model_names() -> tuple[list[str], list[str]]:
    """The names that timm and Trainyard register, as their sources say, and timm's former names."""
    (timm,) = find_spec("timm").submodule_search_locations  # type: ignore[union-attr,misc]
    paths = [*Path(timm, "models").glob("*.py"), *Path(__file__).parent.glob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    former = re.findall(r"['\"](\w+)['\"]\s*:", "\n".join(_FORMER.findall(source)))
    return sorted(_REGISTERED.findall(source)), former


def check_name(name: str) -> None:
    """RecipeError, with similar names, unless timm has a model of this name or it is one's own."""
    names, former = model_names()
    model, timm = name.partition(".")[0], sys.modules.get("timm")
    # A program that has imported timm may have registered models itself.
    if is_own(name) or model in names or model in former or (timm and timm.is_model(name)):
        return
    near = closest(model, names) or difflib.get_close_matches(model, names, cutoff=_NEAR)
    raise RecipeError(
        "model.unknown-name",
        "model.name: timm has no model {name!r}{hint}",
        name=name,
        hint=as_question([*map(repr, near)]) or "; timm.list_models() has them all",
    )


def check_weights(name: str) -> None:
    """CheckpointError if timm's weights of a model are in no cache, and the Hub has no address."""
    from huggingface_hub import constants

    model, hub = name.partition(".")[0], Path(constants.HF_HUB_CACHE)
    cached = (path.name for path in hub.glob("models--*"))
    of_torch = Path(os.environ.get("TORCH_HOME", Path(constants.default_home, "torch")), "hub")
    # Some weights lie under names of others than timm.
    is_cached = any(model in each or not each.startswith("models--timm--") for each in cached)
    if (
        is_own(name)
        or is_cached
        or any(of_torch.glob("checkpoints/*"))
        or not is_hub_unknown(_PATIENCE_S)
    ):
        return
    reason = f"{constants.ENDPOINT} cannot be reached"
    raise not_downloaded(name, "model.checkpoint", "timm", reason)


def not_downloaded(name: str, key: str, value: str, reason: str) -> CheckpointError:
    """The error for weights of timm that could not be had; `key` and `value` asked for them."""
    return CheckpointError(
        "weights.not-downloaded",
        "--{key} {value}: cannot get the weights of {name}: {reason}. Without a network: --{key} "
        "FILE takes a file of them, from https://huggingface.co/timm; the recipe finetune-small "
        "has a smaller one, and photos needs none",
        key=key,
        value=value,
        name=name,
        reason=reason,
    )


def is_hub_unknown(patience_s: float | None = None) -> bool:
    """True if the name of the Hub's server cannot be resolved, or HF_HUB_OFFLINE is set.

    False if that takes more than `patience_s`; None waits.
    """
    from huggingface_hub import constants

    failed: list[OSError] = []

    def resolve() -> None:
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
        except OSError as error:
            failed.append(error)

    if constants.HF_HUB_OFFLINE or getproxies():  # a proxy resolves names itself
        return bool(constants.HF_HUB_OFFLINE)
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(patience_s)
    return bool(failed)
