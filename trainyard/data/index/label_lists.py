"""Lists of labels, for images with any number of classes: stored end to end in two columns."""

from typing import NamedTuple

import numpy as np

from trainyard.data.arrays import Bools, Int32s, Ints


class LabelLists(NamedTuple):
    """List n has the class numbers values[ends[n - 1] : ends[n]], ascending; it may be empty."""

    ends: Ints  # [lists]
    values: Int32s  # [all labels]

    def of(self, number: int) -> list[int]:
        """The class numbers in a list."""
        start = self.ends[number - 1] if number else 0
        labels: list[int] = self.values[start : self.ends[number]].tolist()
        return labels

    def flat(self, numbers: Int32s) -> tuple[Ints, Int32s]:
        """The labels of lists, as positions in `numbers` and class numbers: pairs in order."""
        ends = self.ends[numbers]
        lengths = ends - np.where(numbers > 0, self.ends[numbers - 1], 0)
        rows = np.repeat(np.arange(len(numbers)), lengths)
        positions = np.arange(len(rows)) + np.repeat(ends - np.cumsum(lengths), lengths)
        return rows, self.values[positions]

    def multi_hot(self, numbers: Int32s, num_classes: int) -> Bools:
        """True for the classes in each list: bool[numbers, num_classes]."""
        is_label = np.zeros((len(numbers), num_classes), bool)
        is_label[self.flat(numbers)] = True
        return is_label

    def is_sound(self, numbers: Int32s, num_classes: int) -> bool:
        """True if `numbers` are numbers of lists, and these hold numbers of classes alone."""
        ends, values = self
        return bool(
            (not len(numbers) or (numbers.min() >= 0 and numbers.max() < len(ends)))
            and np.all(np.diff(ends, prepend=0) >= 0)
            and (ends[-1] if len(ends) else 0) == len(values)
            and values.min(initial=0) >= 0
            and values.max(initial=-1) < num_classes
        )


def joined(counts: Int32s, values: Int32s) -> LabelLists:
    """The lists of `counts` labels each that lie end to end in `values`, without repetitions."""
    width = int(values.max(initial=0)) + 1
    keys = np.unique(np.repeat(np.arange(len(counts)), counts) * width + values)
    lengths = np.bincount(keys // width, minlength=len(counts))
    return LabelLists(np.cumsum(lengths), (keys % width).astype("<i4"))
