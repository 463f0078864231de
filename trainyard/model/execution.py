"""Execution modes of a model: recomputed activations, compilation. Results do not change."""

import atexit
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainyard.errors import InputError, RecipeError
from trainyard.files import cache_folder

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_MOST_SHAPES = 64  # beyond this torch.compile leaves a function uncompiled; its default is 8
# timm's classes that train faster compiled on CUDA, with the source; `make gpu` measures more.
_FASTER = {"VisionTransformer": "1.27 times as fast in open_clip issue 610"}


class Mode(NamedTuple):
    """A mode of torch.compile, and why it was chosen."""

    name: str
    reason: str


def choose_mode(mode: str, model: nn.Module, device: torch.device, *, is_steady: bool) -> Mode:
    """The mode to compile a model with: `mode`, unless it is "auto".

    `is_steady`: False if the model changes while it trains, so that it would be compiled anew.
    """
    if mode != "auto":
        return Mode(mode, "as the recipe says")
    if device.type != "cuda":
        return Mode("off", "no CUDA device")
    if not is_steady:
        return Mode("off", "schedule.drop_path_start changes the model in every epoch")
    kinds = [kind.__name__ for kind in type(model).__mro__]  # FSDP puts a class of its own first
    known = next((kind for kind in kinds if kind in _FASTER), None)
    if known is None:
        return Mode("off", f"a {kinds[0]} is not known to train faster compiled")
    return Mode("default", f"a {known} trains {_FASTER[known]}")


def recompute_activations(model: nn.Module, name: str) -> None:
    """Keep only the activations between a timm model's blocks, from the next forward pass on."""
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        raise RecipeError(
            "model.no-grad-checkpointing",
            "model.grad_checkpointing = true: {name} does not support it; set a smaller "
            "batch.micro",
            name=name,
        ) from None


def compile_in_place(model: nn.Module, mode: str, *, in_pieces: bool = True) -> None:
    """Compile a model with torch.compile's `mode`; "off" does nothing.

    In place, so that names of weights stay. A model in DDP must be compiled after it is wrapped:
    it then compiles in pieces, so that averaging begins before the backward pass ends. Pieces
    round otherwise than the whole; without `in_pieces` there are none.

    Each shape has code of its own: that for any shape is slower, and a run has few shapes, those of
    its phases, of its last micro-batches and of its evaluations.
    """
    if mode != "off":
        import torch._dynamo  # takes a second

        dynamo: Any = torch._dynamo.config
        dynamo.optimize_ddp = in_pieces
        dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_SHAPES)
        model.compile(mode=mode, dynamic=False)


def keep_compiled_code() -> str | None:
    """Have torch keep what it compiles, for the next start, in a folder of this user alone.

    By default it lies in a temporary folder, which any user of the machine may make first, and runs
    code when it is read. Where there can be none to keep, it is a new one, removed at the end, and
    the reason is returned. A `TORCHINDUCTOR_CACHE_DIR` stays as it is.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # torch itself sets it

    if os.environ.get(_COMPILED, default_cache_dir()) != default_cache_dir():
        return None
    reason = None
    try:
        folder = _kept_folder()
    except (OSError, InputError) as error:
        folder, reason = Path(tempfile.mkdtemp(prefix="trainyard-compiled-")), str(error)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[_COMPILED] = str(folder)
    return reason


def _kept_folder() -> Path:
    """OSError or InputError if it cannot be, or files in it cannot be locked."""
    folder = cache_folder() / f"compiled-{_of_this_node()}"
    if " " in str(folder):  # which torch does not quote for the compiler
        raise InputError("file.unusable", path=folder, reason="has a space in its path")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise InputError("file.unusable", path=folder, reason="is not a folder of this user alone")
    with open(folder / "lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
    return folder


def _of_this_node() -> str:
    """A name for this host and its kind of processor, for which torch compiles.

    Nodes that share a folder break each other's files (issue 11512 of triton).
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{socket.gethostname()} {features}".encode()).hexdigest()[:16]


def has_cuda_graphs(mode: str) -> bool:
    """True if a mode of torch.compile replays CUDA graphs (on a GPU)."""
    return mode in ("reduce-overhead", "max-autotune")
