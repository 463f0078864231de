"""The first import of timm, without torch's compiler, which would take a third of every start.

torchvision and timm import `torch._dynamo` for one function each, which only compiled models need.
While timm is imported both are replaced by functions that find the real ones when they are called.
A module that needs more of the compiler gets the real one.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch

_COMPILER, _UTILITIES = "torch._dynamo", "torch._dynamo.utils"


def import_timm() -> None:
    """Import timm; without effect if it, or the compiler, has been imported before."""
    if "timm" in sys.modules or _COMPILER in sys.modules:
        return
    with _light_compiler():
        import timm  # noqa: F401


@contextmanager
def _light_compiler() -> Iterator[None]:
    utilities, disable = _Utilities(_UTILITIES), torch.compiler.disable
    sys.modules[_UTILITIES] = utilities
    torch.compiler.disable = _disable  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = disable
        if sys.modules.get(_UTILITIES) is utilities:
            del sys.modules[_UTILITIES]


class _Utilities(ModuleType):
    """Stands for torch._dynamo.utils; loads it for any other name."""

    def is_compile_supported(self, device: Any) -> Any:
        return _real().is_compile_supported(device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(), name)


def _real() -> Any:
    if isinstance(sys.modules.get(_UTILITIES), _Utilities):
        del sys.modules[_UTILITIES]
    return importlib.import_module(_UTILITIES)


def _disable(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.disable, applied when the function is called and something may be compiled."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*arguments, **options)
        disable: Any = torch.compiler.disable
        return disable(function)(*arguments, **options)

    return call
