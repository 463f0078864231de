"""The zygote: a process that has imported all that a run imports, and forks a copy for each start.

server.py FOLDER PARENT: in FOLDER are the socket, beside the client, and `python.real`, a list of
starts that were real ones after all. It ends with PARENT, a pid.
"""

import array
import atexit
import gc
import importlib
import io
import marshal
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

BEFORE, PATH = dict(os.environb), list(sys.path)

# Variables that count while modules are imported, or before. One that differs asks for a real
# start, unless a copy heeds it.
_AT_IMPORT = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "KMP_", "GOMP_", "MKL_"),
    *("OPENBLAS", "TORCH", "PYTORCH", "NVIDIA", "TRITON", "TIMM", "HF_", "HUGGINGFACE", "HOME"),
    *("XDG_", "SSL_", "REQUESTS_", "WANDB_", "MPL", "FSSPEC_", "ARROW_", "PIL"),
)
_THREADS, _UNBUFFERED = "OMP_NUM_THREADS", "PYTHONUNBUFFERED"
_READ_LATER = (
    *("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    *("WANDB_SERVICE", "WANDB__"),
)
_HEEDED = (_THREADS, _UNBUFFERED, "PYTHONSAFEPATH", *_READ_LATER)

_IMPORTED_LATER = (
    *("encodings.cp437", "encodings.utf_8_sig", "numpy.ctypeslib", "numpy.ma", "rich._emoji_codes"),
    *("timm.optim", "torch.utils.serialization"),
)
_SET_ASIDE = 500  # descriptors from here on


def import_all() -> None:
    import trainyard

    for found in pkgutil.walk_packages(trainyard.__path__, "trainyard."):
        # Ray puts libraries of its own first on the path.
        if "__main__" not in found.name and not found.name.startswith("trainyard.launch.ray"):
            importlib.import_module(found.name)
    for name in _IMPORTED_LATER:
        importlib.import_module(name)
    importlib.import_module("PIL.Image").init()


def serve(folder: Path, parent: int) -> None:
    sys.executable = str(folder / "python")
    here = runpy.run_path(str(Path(__file__).with_name("client.py")))["conditions"]()
    import_all()
    here["added"] = {name: text for name, text in os.environb.items() if name not in BEFORE}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps monitors
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; this ends with pytest
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket.new"))
    listener.listen(128)
    (folder / "socket.new").rename(folder / "socket")
    end = os.pidfd_open(parent)
    awaited: list[Any] = [listener, end]
    while end not in select.select(awaited, [], [])[0]:
        peer, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(end)
            monitor(peer, here)
        peer.close()
    os._exit(0)


def monitor(peer: socket.socket, here: dict[str, Any]) -> NoReturn:
    """Start a copy and wait for its end, or for that of its client or of the client's parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked, given = _received(peer)
    try:
        parent = os.pidfd_open(asked["parent"])
        difference = differs(asked, here)
    except OSError:
        difference = "its parent is gone"
    if difference:
        with open(f"{sys.executable}.real", "a") as file:
            print(difference, *asked["words"], file=file)
        peer.sendall(bytes(4))
        os._exit(0)
    if (child := os.fork()) == 0:
        peer.close()
        os.close(parent)
        become(asked, given, here)
    for number in given:
        os.close(number)
    peer.sendall(child.to_bytes(4, "little"))
    ended = os.pidfd_open(child)
    awaited: list[Any] = [peer, ended, parent]
    ready, _, _ = select.select(awaited, [], [])
    if ended not in ready:
        if peer not in ready:
            os._exit(0)  # the copy loses its parent, and gets the signal that it has asked for
        os.kill(child, signal.SIGKILL)  # as its client was
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        peer.sendall(code.to_bytes(4, "little", signed=True))
    os._exit(0)


def _received(peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, rights, _, _ = peer.recvmsg(4, socket.CMSG_SPACE(4 * 250))
    given = array.array("i")
    for _, _, data in rights:
        given.frombytes(data)
    with peer.makefile("rb") as file:
        return marshal.loads(file.read(int.from_bytes(head, "little"))), list(given)


def differs(asked: dict[str, Any], here: dict[str, Any]) -> str:
    """The first condition of a start that a copy cannot have; empty if it can have all."""
    if asked["of_machine"] != here["of_machine"]:
        return "its user or its machine"
    theirs, added = asked["environment"], here["added"]
    for name in theirs.keys() | BEFORE.keys():
        told = os.fsdecode(name)
        if told.startswith(_AT_IMPORT) and not told.startswith(_HEEDED):
            default = added.get(name)
            if theirs.get(name, default) != BEFORE.get(name, default):
                return told
    if max(asked["descriptors"]) >= _SET_ASIDE:
        return "descriptors"
    return "" if asked["limits"] == here["limits"] else "limits"


def become(asked: dict[str, Any], given: list[int], here: dict[str, Any]) -> NoReturn:
    """This process takes on the conditions of a start, and then runs the module."""
    os.setsid()
    _take_descriptors(asked["descriptors"], given)
    os.umask(asked["umask"])
    os.nice(asked["nice"] - os.nice(0))
    os.environb.clear()
    os.environb.update(here["added"] | asked["environment"])
    time.tzset()
    words = [sys.executable, *asked["words"]]
    _show([os.fsencode(word) for word in words], asked["environment"])
    _take_cores(asked["cores"], here["cores"])
    os.getppid = lambda: int(asked["parent"])
    random.seed()
    sys.modules["numpy"].random.seed()
    tempfile.tempdir = None
    _open_streams(is_unbuffered=bool(os.environ.get(_UNBUFFERED)))

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    sys.orig_argv = words
    _, module, *arguments = [word for word in asked["words"] if word != "-P"]
    sys.argv = ["-m", *arguments]
    sys.path[:] = [_folder(), *PATH]  # of which trainyard/__main__.py takes the folder away
    sys.modules["__main__"] = types.ModuleType("__main__")
    code: Any = None
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        told = error.__traceback__
        traceback.print_exception(error.with_traceback(told and told.tb_next))
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _end(code: Any) -> NoReturn:
    """This process ends as Python does, without freeing modules: that would take a second."""
    if not (code is None or isinstance(code, int)):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _take_descriptors(numbers: list[int], given: list[int]) -> None:
    """Has those of the client, by their numbers, and no other; its folder comes last."""
    for index, number in enumerate(given):
        os.dup2(number, _SET_ASIDE + index)
    os.closerange(0, _SET_ASIDE)
    os.fchdir(_SET_ASIDE + len(numbers))
    for index, number in enumerate(numbers):
        os.dup2(_SET_ASIDE + index, number)
    os.closerange(_SET_ASIDE, _SET_ASIDE + len(given))


def _take_cores(cores: list[int], ours: list[int]) -> None:
    """And as many threads as torch has where it is loaded with them."""
    os.sched_setaffinity(0, cores)
    asked = os.environ.get(_THREADS, "")
    if asked.isdigit():
        sys.modules["torch"].set_num_threads(int(asked))
    elif cores != ours:
        sys.modules["torch"].set_num_threads(len(cores))


def _open_streams(*, is_unbuffered: bool) -> None:
    """Standard streams as Python opens them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before, mode = getattr(sys, f"__{name}__"), "w" if number else "r"
        raw = io.FileIO(number, mode, closefd=False)
        raw.name = f"<{name}>"
        buffer: Any = raw  # one more around it would close it at its end
        if not (number and is_unbuffered):
            buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        stream: Any = io.TextIOWrapper(
            buffer,
            before.encoding,
            before.errors,
            newline="\n" if number else None,
            line_buffering=not is_unbuffered and (raw.isatty() or number == 2),
            write_through=is_unbuffered,
        )
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show(words: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Has /proc/PID/cmdline and /proc/PID/environ tell what they would of a real start."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    pairs = [name + b"=" + text for name, text in environment.items()]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for place, texts in ((45, words), (47, pairs)):
            start, end = int(fields[place]), int(fields[place + 1])
            text = b"".join(each + b"\0" for each in texts)[: end - start - 1]
            memory.seek(start)
            memory.write(text.ljust(end - start, b"\0"))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
