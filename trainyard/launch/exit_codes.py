"""Exit codes of ranks: the first cause of a failure, and whether a restart makes sense.

A code is a rank's exit code, or minus the number of the signal that killed it.
"""

import signal

from trainyard.errors import STOPS, DivergedError, InputError, PeerError, Requeued, Stopped

GRACE_S = 300
"""Seconds for ranks to save a checkpoint, after a signal or a lost rank, before they are killed."""
NOTICE_S = 2
"""Seconds for ranks to notice a lost rank by themselves: their own message says more."""
REQUEUE_SIGNALS = tuple(number for number, stop in STOPS.items() if stop is Requeued)
"""Signals after which ranks save and end with 75."""
REQUEUED = (Requeued.exit_code, *(-number for number in REQUEUE_SIGNALS))
"""Codes of a rank that is to be started again. The signals kill one that has nothing to save."""
STOPPED = (Stopped.exit_code, *(-number for number, stop in STOPS.items() if stop is Stopped))
"""Codes of a rank that was stopped, in the same way."""
SHARED_CODES = frozenset((0, Stopped.exit_code, Requeued.exit_code))
"""Either all ranks end with such a code, or none does."""

_FINAL = (0, InputError.exit_code, DivergedError.exit_code, *STOPPED, *REQUEUED)
# Codes that are not the first cause if another rank has another code, the likeliest cause first.
# The last two are those of ranks that ended because another one did.
_LATER_CAUSES = (
    *REQUEUED,
    *(code for code in STOPPED if code != -signal.SIGTERM),
    0,
    *(PeerError.exit_code, -signal.SIGTERM),
)


def is_final(code: int) -> bool:
    """True if a restart cannot help or is not wanted."""
    return code in _FINAL


def first_cause(codes: dict[int, int]) -> tuple[int, int]:
    """The rank that ended the run, and its code. `codes`: by rank.

    A failure takes precedence over a stop, since the launcher stops the remaining ranks after a
    failure. Ranks that failed because another one did come last.
    """

    def priority(rank: int) -> tuple[int, int]:
        code = codes[rank]
        return _LATER_CAUSES.index(code) if code in _LATER_CAUSES else -1, rank

    rank = min(codes, key=priority)
    return rank, codes[rank]


def describe(rank: int, code: int) -> str:
    """A sentence about the end of a rank; a negative code is the number of a signal."""
    if code > 0:
        return f"rank {rank} has ended with exit code {code}"
    cause = "; signal 9 without your doing usually means that memory ran out" * (code == -9)
    return f"rank {rank} was killed by signal {-code}{cause}"


def shell_code(code: int) -> int:
    """The code as a shell reports it: 128 + number for a signal."""
    return 128 - code if code < 0 else code
