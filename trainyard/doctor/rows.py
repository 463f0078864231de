"""A finding as a row of a table, out of what each rank has found for itself."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.errors import TrainyardError
from trainyard.world import gather

if TYPE_CHECKING:
    from trainyard.doctor.patient import Patient

OK, WARN, FAIL = "ok", "warn", "fail"
_NAMED = 3  # ranks that a row names; more are counted


class Row(NamedTuple):
    what: str
    found: str
    verdict: str = OK
    advice: str = ""
    """What to do, of a row that is not ok."""


class Problem(NamedTuple):
    """What a rank says in place of a value that it could not find."""

    text: str


class Check(NamedTuple):
    """Something that each rank finds out, and what all of it together means."""

    what: str
    measure: "Callable[[Patient], Any]"
    judge: "Callable[[list[Any], Patient], Row]"
    """Given every rank's value."""
    advice: str = ""
    """Where it cannot be measured."""


def ask(check: Check, patient: "Patient") -> Row:
    """The row of a check, the same on every rank; all ranks call it."""
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
    """What some ranks have found: rank 3 (b): …; rank 4 (b): … and 2 more."""
    if patient.world.size == 1:
        return found[0]
    words = [f"{patient.names[rank]}: {text}" for rank, text in found.items()]
    more = len(words) - _NAMED
    return "; ".join(words[:_NAMED]) + f" and {more} more" * (more > 0)


def spread(
    values: Sequence[float], names: Sequence[str], form: Callable[[float], str], worst: str = ""
) -> str:
    """8 ranks: 11.2 GB to 11.9 GB, least rank 3 (b). `worst`: least or most, whichever is bad."""
    low, high = form(min(values)), form(max(values))
    if len(values) == 1:
        return low
    if low == high:
        return f"{low} each"
    extreme = min(values) if worst == "least" else max(values)
    where = f", {worst} {names[list(values).index(extreme)]}" if worst else ""
    return f"{low} to {high}{where}"
