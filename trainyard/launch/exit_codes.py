"""Exit codes of ranks: the first cause of a failure, and whether a restart makes sense.

A code is a rank's exit code, or minus the number of the signal that killed it.
"""

import signal
from collections.abc import Callable

from trainyard.errors import (
    STOPS,
    DivergedError,
    InputError,
    PeerError,
    Requeued,
    Stopped,
    TrainyardError,
)
from trainyard.launch.signals import stopped_by

GRACE_S = 300
"""Seconds for ranks to save a checkpoint, after a signal or a lost rank, before they are killed."""
NOTICE_S = 2
"""Seconds for ranks to notice a lost rank by themselves: their own message says more."""

MISTAKES = (InputError.exit_code, DivergedError.exit_code)
"""Exit codes of failures that recur: wrong input, diverged."""
OVER = (0, *MISTAKES)
"""Exit codes after which a run need not start again: done, a mistake, diverged."""

LEFT = 128 + signal.SIGTERM
"""The exit code of an agent that was told to end, while others go on."""

# Before the first step a rank has nothing to save, and the signal kills it.
_BEFORE_TRAINING = {-number: stop.exit_code for number, stop in reversed(STOPS.items())}
_STOPS = (0, Stopped.exit_code, Requeued.exit_code)
# Codes that are not the first cause if another rank has another code, the likeliest cause first:
# those of ranks that lost another one, that saved, and that a launcher has ended.
_LATER_CAUSES = (PeerError.exit_code, *reversed(_STOPS), *_BEFORE_TRAINING)


def meaning_of(code: int) -> int:
    """A code as a shell reports it, 128 + number for a signal; 130 or 75 if that was a stop."""
    return _BEFORE_TRAINING.get(code, 128 - code if code < 0 else code)


def is_stop(code: int) -> bool:
    """True if all that this rank has trained is saved."""
    return meaning_of(code) in _STOPS


def is_final(code: int) -> bool:
    """True if a restart cannot help or is not wanted."""
    return is_stop(code) or code in MISTAKES


def first_cause(codes: dict[int, int]) -> tuple[int, int]:
    """The rank that ended the run, and its code. `codes`: by rank.

    A failure takes precedence over a stop, since launchers stop the other ranks after a failure.
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
    return str(killed(rank, -code))


def code_after(
    number: int, codes: dict[int, int], reason_of: Callable[[int, int], str] = describe
) -> int:
    """The exit code of a launcher that passed a signal on, by the codes of its ranks.

    TrainyardError if a rank could not save: the codes of a stop mean that all is saved.
    """
    rank, code = first_cause(codes) if codes else (0, Stopped.exit_code)
    if not is_stop(code):
        raise ending_with(
            code,
            TrainyardError(
                "launch.not-saved", "stopped, but not saved: {reason}", reason=reason_of(rank, code)
            ),
        )
    return stopped_by(number).exit_code if code else 0


def ending_with(code: int, error: TrainyardError) -> TrainyardError:
    """The error, which ends the launcher with a rank's code."""
    error.exit_code = meaning_of(code)
    return error


def killed(rank: int, number: int) -> TrainyardError:
    """The error of a rank that a signal killed."""
    hint = "; signal 9 without your doing usually means that memory ran out" * (number == 9)
    return TrainyardError(
        "launch.rank-killed",
        "rank {rank} was killed by signal {signal}{hint}",
        rank=rank,
        signal=number,
        hint=hint,
    )
