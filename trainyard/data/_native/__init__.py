"""The C extension: `core` is None where it could not be built, without a compiler for instance.

Everything works without it, by simplejpeg and Pillow, at about a quarter of the speed.
"""

try:
    from trainyard.data._native import core
except ImportError:
    core = None  # type: ignore[assignment]

NEEDS_EXTENSION = (
    "install a C compiler and run `pip install --force-reinstall --no-deps --no-cache-dir "
    "trainyard`"
)


def is_built() -> bool:
    return core is not None


__all__ = ["NEEDS_EXTENSION", "core", "is_built"]
