"""Starts the command line. What it needs first is small, so that a Ctrl-C at once is one line."""

import os
import signal
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all else here
if TYPE_CHECKING:
    from typing import NoReturn

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the working directory, whose files are not to be imported for modules


def command() -> "NoReturn":
    """Entry point of the console script: runs a command and exits with its code."""
    heeds_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds_interrupt:  # an exception would end an import anywhere, and show where
        signal.signal(signal.SIGINT, _interrupted)
    if not os.environ.get("PYTHONSAFEPATH"):  # for processes that multiprocessing starts
        os.environ["PYTHONSAFEPATH"] = "trainyard"  # any text switches it on: see children.py
    from trainyard.streams import protect_streams

    protect_streams()
    from trainyard.command_line import end, main

    try:
        if heeds_interrupt:
            signal.signal(signal.SIGINT, _raise_interrupt)
        code = main()
        for number in (signal.SIGINT, signal.SIGXCPU):  # all is done: only the interpreter ends
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        _interrupted()
    end(code)


def _raise_interrupt(number: int, frame: object) -> None:
    """As Python does by default, but not inside the import of torch: its C++ would abort."""
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        _interrupted()
    raise KeyboardInterrupt


def _interrupted(number: int = signal.SIGINT, frame: object = None) -> "NoReturn":
    try:
        os.write(2, b"trainyard: interrupted\n")
    finally:
        os._exit(130)  # as Stopped.exit_code, which is not imported yet


if __name__ == "__main__":
    command()
