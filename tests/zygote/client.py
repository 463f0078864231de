"""Stands in for Python: asks the zygote to run a command, and ends as that ends. It takes 15 ms.

Beside it are `socket`, the zygote's, and `real`, the Python that starts what the zygote does not
know, and what it cannot run as a real start would.
"""

# `signal` and `socket` take as long to import as all else here.
import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_MODULES = ("trainyard", "tests.zygote.facts")
_REAL = "TRAINYARD_TESTS_REAL"
_PASSED_ON = (1, 2, 3, 10, 12, 14, 15, 18, 24)
_IGNORED_BY_PYTHON = (13, 25)  # SIGPIPE and SIGXFSZ
_SPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_LIMITS = sorted(
    number
    for name, number in vars(resource).items()
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"  # another name of NOFILE
)


def conditions() -> "dict[str, Any]":
    """This process inherited these from its parent, as it did variables and descriptors."""
    mask = os.umask(0)
    os.umask(mask)
    ignored = [
        number
        for number in range(1, _signal.NSIG)
        if number not in _IGNORED_BY_PYTHON and _signal.getsignal(number) == _signal.SIG_IGN
    ]
    return {
        "parent": os.getppid(),
        "umask": mask,
        "ignored": ignored,
        "blocked": [int(each) for each in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])],
        "limits": [resource.getrlimit(kind) for kind in _LIMITS],
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "of_machine": (
            *(os.getresuid(), os.getresgid(), os.getgroups()),
            [os.readlink(f"/proc/self/ns/{name}") for name in _SPACES],
            os.stat("/").st_ino,
        ),
    }


def main(folder: str, *words: str) -> "NoReturn":
    descriptors = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_given(number)]
    _, *module = [word for word in words[:3] if word != "-P"] or [""]
    is_known = "-m" in words[:2] and module[:1] in [[name] for name in _MODULES]
    if is_known and {0, 1, 2} <= set(descriptors) and _REAL not in os.environ:
        server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            server.connect(f"{folder}/socket")
        except OSError:
            pass
        else:
            _ask(server, words, descriptors)
    python = os.readlink(f"{folder}/real")  # its folder tells what is installed
    os.execv(python, [python, *words])


def _ask(server: "Any", words: tuple[str, ...], descriptors: list[int]) -> None:
    """Ends as the copy that the server makes; returns if it makes none."""
    signals: list[int] = []  # that came before the copy was there
    copy = 0

    def pass_on(number: int, frame: object) -> None:
        if copy:
            os.kill(copy, number)
        else:
            signals.append(number)

    asked = conditions()
    caught = [number for number in _PASSED_ON if number not in asked["ignored"]]
    for number in caught:
        _signal.signal(number, pass_on)
    asked |= {"words": words, "environment": dict(os.environb), "descriptors": descriptors}
    data = marshal.dumps(asked)
    given = b"".join(n.to_bytes(4, "little") for n in (*descriptors, os.open(".", os.O_PATH)))
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, given)
    server.sendmsg([len(data).to_bytes(4, "little")], [rights])
    server.sendall(data)
    copy = int.from_bytes(server.recv(4), "little")
    for number in () if copy else caught:
        _signal.signal(number, _signal.SIG_DFL)
    for number in signals:
        os.kill(copy or os.getpid(), number)
    if copy:
        _end_as_copy(server, descriptors)


def _end_as_copy(server: "Any", descriptors: list[int]) -> "NoReturn":
    _vanish()
    for number in descriptors:
        os.close(number)  # who reads a pipe waits for the copy's end alone
    answer = server.recv(4)
    code = int.from_bytes(answer, "little", signed=True) if answer else 70
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != 9:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_given(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # it was that of the list itself
        return False


def _vanish() -> None:
    """Clears what /proc tells of words and variables: the copy has them."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for start, end in (fields[45:47], fields[47:49]):
            memory.seek(int(start))
            memory.write(bytes(int(end) - int(start)))


if __name__ == "__main__":
    main(os.path.dirname(sys.argv[0]), *sys.argv[1:])
