"""The C extension: `core` is None where it could not be built, without a compiler for instance.

Everything but packed coefficients works without it, by Pillow, at about a quarter of the speed.
"""

import threading

try:
    from trainyard.data._native import core
except ImportError:
    core = None  # type: ignore[assignment]

_threads = threading.local()


def is_built() -> bool:
    """True if the C extension is installed."""
    return core is not None


def own_decoder() -> "core.Decoder | None":
    """This thread's C decoder, which keeps its memory between calls; None without the extension."""
    decoder: core.Decoder | None = getattr(_threads, "decoder", None)
    if decoder is None and core is not None:
        decoder = _threads.decoder = core.Decoder()
    return decoder


__all__ = ["core", "is_built", "own_decoder"]
