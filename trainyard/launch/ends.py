"""How a rank ended, and whether to start again."""

import signal

from trainyard.errors import DivergedError, InputError, PeerError, Requeued, Stopped

GRACE_S = 300
"""For ranks to save a checkpoint after a signal, or after another has died, before they are killed.
"""
NOTICE_S = 2
"""For ranks to notice by themselves that one is gone: they do, and then have more to say."""
REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What ranks take for: save, and end with 75."""

SHARED_ENDS = frozenset((0, Stopped.exit_code, Requeued.exit_code))
"""Exit codes of all ranks, or of none."""

# Exit codes after which it is of no use to start again, or not wanted.
_LAST = (
    *(0, InputError.exit_code, DivergedError.exit_code, Stopped.exit_code, Requeued.exit_code),
    *(-signal.SIGTERM, -signal.SIGINT),
)
_ASKED = (Requeued.exit_code, Stopped.exit_code)
# Those of ranks that end because another did: by its loss, and by a launcher's signal.
_FOLLOW = (PeerError.exit_code, -signal.SIGTERM)


def is_last(code: int) -> bool:
    """Whether not to start again after a rank's exit code, or minus the signal that killed it."""
    return code in _LAST


def first_cause(ends: dict[int, int]) -> tuple[int, int]:
    """The rank that ended it for all, and how: its exit code, or minus the signal that killed it.

    A stop comes after a failure: it may be a launcher's, for ranks that were left. Ranks that
    failed because another did come last.
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
    """An exit code as a shell has it."""
    return 128 - code if code < 0 else code
