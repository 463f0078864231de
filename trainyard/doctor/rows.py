"""Rows of the doctor's table, from the findings of all ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.errors import TrainyardError
from trainyard.world import gather

if TYPE_CHECKING:
    from trainyard.doctor.patient import Patient

OK, WARN, FAIL = "ok", "warn", "fail"
_NAMED = 3  # ranks that a row names; others are counted


class Row(NamedTuple):
    what: str
    found: str
    verdict: str = OK
    advice: str = ""
    """Advice; empty for a row that is ok."""


class Problem(NamedTuple):
    """A rank's error in place of a value."""

    text: str


class Check(NamedTuple):
    """A measurement on each rank, and the judgement of all of them together."""

    what: str
    measure: "Callable[[Patient], Any]"
    judge: "Callable[[list[Any], Patient], Row]"
    """Receives the value of every rank."""
    advice: str = ""
    """Advice if the measurement fails."""


def ask(check: Check, patient: "Patient") -> Row:
    """Run a check. Returns its row, the same on every rank; all ranks call it."""
    answers = gather(patient.world, attempt(check.measure, patient))
    failed = {rank: answer.text for rank, answer in enumerate(answers) if type(answer) is Problem}
    if failed:
        return Row(check.what, differing(failed, patient), FAIL, check.advice)
    return check.judge(answers, patient)


def attempt(measure: "Callable[[Patient], Any]", patient: "Patient") -> Any:
    try:
        return measure(patient)
    except (OSError, TrainyardError) as error:
        return Problem(str(error))


def differing(found: dict[int, str], patient: "Patient") -> str:
    """Findings of some ranks: rank 3 (b): …; rank 4 (b): … and 2 more."""
    if patient.world.size == 1:
        return found[0]
    words = [f"{patient.names[rank]}: {text}" for rank, text in found.items()]
    more = len(words) - _NAMED
    return "; ".join(words[:_NAMED]) + f" and {more} more" * (more > 0)


def spread(
    values: Sequence[float], names: Sequence[str], form: Callable[[float], str], worst: str = ""
) -> str:
    """8 ranks: 11.2 GB to 11.9 GB, least rank 3 (b). `worst`: the bad end, least or most."""
    low, high = form(min(values)), form(max(values))
    if len(values) == 1:
        return low
    if low == high:
        return f"{low} each"
    extreme = min(values) if worst == "least" else max(values)
    where = f", {worst} {names[list(values).index(extreme)]}" if worst else ""
    return f"{low} to {high}{where}"
