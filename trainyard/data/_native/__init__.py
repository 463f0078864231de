"""The decoder in C, as far as it could be built: `core` is None where there was no compiler.

Everything works without it, by simplejpeg and Pillow, at about a quarter of the speed.
"""

try:
    from trainyard.data._native import core
except ImportError:
    core = None  # type: ignore[assignment]

__all__ = ["core"]
