"""Multi-hot targets on the device, from lists of labels."""

import numpy as np
import torch
from torch import Tensor

from trainyard.data.index.label_lists import LabelLists


class MultiHot:
    """Turns numbers of lists, int64[B], into targets, float32[B, classes]: 1 for each label.

    The lists lie on the device: 8 bytes for each image and 4 for each label. A call waits for
    nothing, as every batch has as many places for labels per image as the longest list needs.
    """

    def __init__(self, lists: LabelLists, num_classes: int, device: torch.device) -> None:
        starts = np.concatenate([[0], lists.ends])
        values = np.append(lists.values, np.int32(num_classes))  # never empty
        self._starts = torch.from_numpy(starts).to(device)
        self._values = torch.from_numpy(values).to(device)
        self._places = torch.arange(int(np.diff(starts).max(initial=0)), device=device)
        self._num_classes = num_classes

    def __call__(self, numbers: Tensor) -> Tensor:
        places = self._starts[numbers][:, None] + self._places
        is_own = places < self._starts[numbers + 1][:, None]
        labels = self._values[places.clamp(max=len(self._values) - 1)].long()
        labels = labels.where(is_own, self._num_classes)  # a column for places without a label
        targets = torch.zeros(len(numbers), self._num_classes + 1, device=numbers.device)
        return targets.scatter_(1, labels, 1.0)[:, : self._num_classes]
