"""Groups of runs that differ in the seed alone, and differences between recipes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from trainyard.compare import PRACTICAL
from trainyard.report.runs import Run

_SEED = "run.seed"


@dataclass(frozen=True)
class Group:
    name: str
    runs: tuple[Run, ...]

    @property
    def is_several(self) -> bool:
        return len(self.runs) > 1


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order of their first runs. A run with a repeated seed gets its own group."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        key = repr((_what_counts(run), run.environment.get("fingerprints")))
        seeds = [other.recipe.get(_SEED) for other in found.get(key, ())]
        if not run.recipe or run.recipe.get(_SEED) in seeds:
            key += f" {run.folder.path}"
        found.setdefault(key, []).append(run)
    return [Group(_name(group), tuple(group)) for group in found.values()]


def _what_counts(run: Run) -> list[tuple[str, Any]]:
    aside = PRACTICAL | {_SEED}  # the data's fingerprint is compared instead
    return sorted((key, of) for key, of in run.recipe.items() if key not in aside)


def _name(runs: list[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    common = _common([run.name for run in runs]).rstrip("0123456789")
    common = common.removesuffix("seed").rstrip("-_./= ")
    return f"{common or f'{runs[0].name} … {runs[-1].name}'} ({len(runs)} seeds)"


def _common(names: list[str]) -> str:
    """The common prefix of all names."""
    columns = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in columns)


def differences(runs: Iterable[Run]) -> list[tuple[str, list[Any]]]:
    """Recipe keys that differ between runs, with each run's value; None if unset."""
    recipes = [run.recipe for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [(key, [recipe.get(key) for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if any(of != values[0] for of in values)]
