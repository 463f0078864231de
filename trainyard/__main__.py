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
    from trainyard.interrupts import end_interrupted, raise_interrupt
    from trainyard.parent import LAUNCHER

    # A cluster that a script has started in the background ignores it; a launcher passes it on.
    is_passed_on = LAUNCHER in os.environ
    heeds_interrupt = is_passed_on or signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds_interrupt:  # an exception would end an import anywhere, and show where
        signal.signal(signal.SIGINT, end_interrupted)
    if not os.environ.get("PYTHONSAFEPATH"):  # for processes that multiprocessing starts
        os.environ["PYTHONSAFEPATH"] = "trainyard"  # any text switches it on: see children.py
    from trainyard.streams import protect_streams

    protect_streams()
    from trainyard.command_line import end, main

    try:
        if heeds_interrupt:
            signal.signal(signal.SIGINT, raise_interrupt)
        code = main()
        for number in (signal.SIGINT, signal.SIGXCPU):  # all is done: only the interpreter ends
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        end_interrupted()
    end(code)


if __name__ == "__main__":
    command()
