"""Exit codes of ranks: the first cause of an end, and whether to restart."""

import signal

from trainyard.errors import DivergedError, InputError, PeerError, Requeued, Stopped

GRACE_S = 300
"""Seconds for ranks to save a checkpoint, after a signal or a lost rank, before they are killed."""
NOTICE_S = 2
"""Seconds for ranks to notice a lost rank by themselves: their own message says more."""
REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals after which ranks save and end with 75."""

SHARED_ENDS = frozenset((0, Stopped.exit_code, Requeued.exit_code))
"""Exit codes with which either all ranks end or none."""

# Exit codes after which a restart cannot help or is not wanted.
_LAST = (
    *(0, InputError.exit_code, DivergedError.exit_code, Stopped.exit_code, Requeued.exit_code),
    *(-signal.SIGTERM, -signal.SIGINT),
)
_ASKED = (Requeued.exit_code, Stopped.exit_code)
# Exit codes of ranks that end because another did: it was lost, or a launcher sent a signal.
_FOLLOW = (PeerError.exit_code, -signal.SIGTERM)


def is_last(code: int) -> bool:
    """True if `code` rules out a restart. `code`: exit code, or minus the number of a signal."""
    return code in _LAST


def first_cause(ends: dict[int, int]) -> tuple[int, int]:
    """The rank that ended the run, and its exit code, or minus the signal that killed it.

    A failure takes precedence over a stop: the launcher may have stopped the remaining ranks. Ranks
    that failed because another one did come last.
    """
    order = (*_ASKED, 0, *_FOLLOW)

    def place(rank: int) -> tuple[int, int]:
        code = ends[rank]
        return order.index(code) if code in order else -1, rank

    rank = min(ends, key=place)
    return rank, ends[rank]


def described(rank: int, code: int) -> str:
    if code > 0:
        return f"rank {rank} has ended with exit code {code}"
    cause = "; signal 9 without your doing usually means that memory ran out" * (code == -9)
    return f"rank {rank} was killed by signal {-code}{cause}"


def shell_code(code: int) -> int:
    """The exit code as a shell reports it: 128 + number for a signal."""
    return 128 - code if code < 0 else code
