"""Prints what a process finds as it starts, as JSON, and ends as its arguments say."""

import gc
import json
import locale
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

SIGNALS = (1, 2, 3, 10, 12, 14, 15, 24)


def facts() -> dict[str, Any]:
    mask = os.umask(0)
    os.umask(mask)
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)
    streams: list[Any] = [each for each in (sys.stdin, sys.stdout, sys.stderr) if each]
    main: Any = sys.modules["__main__"]
    found: dict[str, Any] = {
        "argv": sys.argv,
        "words": sys.orig_argv[1:],
        "shown_words": _shown("cmdline")[1:],
        "path": sys.path,
        "main": (main.__spec__.name, main.__file__, main.__package__),
        "folder": os.getcwd(),
        "environment": sorted(os.environ.items()),
        "shown_environment": sorted(_shown("environ")),
        "signals": [str(signal.getsignal(number)) for number in SIGNALS],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "descriptors": [number for number in range(500) if _is_open(number)],
        "umask": mask,
        "limits": [resource.getrlimit(kind) for kind in limits],
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "zone": time.tzname,
        "locale": locale.getlocale(),
        "parent": os.getppid(),
        "streams": [
            (s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode, s.isatty())
            for s in streams
        ],
    }
    if "OMP_NUM_THREADS" in os.environ or len(found["cores"]) == 1:
        import torch

        found["threads"] = torch.get_num_threads()
    return found


def _shown(name: str) -> list[str]:
    text = os.fsdecode(Path(f"/proc/self/{name}").read_bytes())
    return [each for each in text.split("\0") if each]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(facts() | {"is_copy": gc.get_freeze_count() > 1000}), flush=True)
    match sys.argv[1:]:
        case ["exit", code]:
            sys.exit(int(code) if code.isdigit() else code)
        case ["draw"]:
            import random

            import numpy as np

            print(random.random(), np.random.random())
        case ["fail"]:
            raise ValueError("as asked")
        case ["kill", number]:
            os.kill(os.getpid(), int(number))
        case ["wait", number]:
            from trainyard.parent import signal_without_parent

            signal_without_parent(signal.SIGUSR1)
            signal.signal(int(number), lambda *_: sys.exit(7))
            print("waiting", os.getpid(), flush=True)
            time.sleep(60)
            sys.exit("nothing came")
