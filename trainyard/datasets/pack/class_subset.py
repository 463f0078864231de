"""Chooses some classes of a data set: at random, from a file, or by name."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainyard.data.rng import fold_in, permute
from trainyard.errors import DataError
from trainyard.hints import did_you_mean


def choose_classes(
    wish: str, classes: Sequence[str] | None, count: int, seed: int
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Sorted positions and names of the classes in `wish`: "N" at random, a file, or "A,B".

    If the `count` classes have no names, their numbers become names, since they are renumbered.
    """
    width = len(str(count - 1))
    names = tuple(classes or (f"{number:0{width}d}" for number in range(count)))
    if wish.isdecimal() and wish in (classes or ()):
        raise DataError("pack.ambiguous-classes", value=wish)
    if wish.isdecimal():
        keep = _at_random(int(wish), count, seed)
    else:
        known = {name: place for place, name in enumerate(names)}
        if classes is None:  # 7 as well as 007
            known |= {str(place): place for place in range(count)}
        keep = np.array(sorted({_find(name, known) for name in _listed(wish)}), np.int64)
    return keep, tuple(names[place] for place in keep.tolist())


def _at_random(wanted: int, count: int, seed: int) -> NDArray[np.int64]:
    if not 0 < wanted <= count:
        raise DataError("pack.too-few-classes", num_wanted=wanted, num_classes=count)
    places = np.arange(count)
    return np.sort(permute(places, fold_in(seed, np.ones_like(places)), count)[:wanted])


def _listed(wish: str) -> list[str]:
    text = Path(wish).read_text() if os.path.isfile(wish) else wish.replace(",", "\n")
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise DataError("pack.no-classes-named", value=wish)
    return names


def _find(name: str, known: dict[str, int]) -> int:
    if name not in known:
        raise DataError("pack.unknown-class", name=name, hint=did_you_mean(name, known))
    return known[name]
