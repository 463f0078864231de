"""How commands load torch."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """A block that imports torch, without searches for garbage among what stays anyway.

    The collector would visit the objects of modules again and again, and once more in each full
    collection of a run. They are handed back to it at the end: extensions such as nanobind's report
    what is left of them then.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)
    finally:
        gc.enable()
