"""Compute and messages of a step."""

from collections.abc import Sequence
from typing import NamedTuple

_FIRST_BYTES, _BYTES = 1 << 20, 25 << 20  # size of torch DDP's first bucket, and of the others
_FORWARD = 1 / 3  # share of a step's compute; a backward pass takes about two forward passes


class Bucket(NamedTuple):
    num_bytes: float
    ready: float  # share of the backward pass after which the bucket is complete


class Job(NamedTuple):
    buckets: tuple[Bucket, ...]  # in the order of the backward pass
    forward: float = _FORWARD

    @property
    def num_bytes(self) -> float:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def scaled(self, factor: float) -> "Job":
        """The job with messages of another size, such as compressed ones."""
        buckets = tuple(Bucket(b.num_bytes * factor, b.ready) for b in self.buckets)
        return self._replace(buckets=buckets)


def build_job(sizes: Sequence[int], *, bytes_per_weight: int = 4) -> Job:
    """A job from the number of weights of each parameter, in the order of the model.

    Buckets are filled like those of torch DDP, from the last parameter to the first. The backward
    pass is assumed to take equally long for each parameter: layers of a model take about equally
    long, while their sizes differ by a factor of a hundred.
    """
    buckets: list[Bucket] = []
    filled = 0
    for number, size in enumerate(reversed(sizes), start=1):
        filled += size * bytes_per_weight
        if filled >= (_BYTES if buckets else _FIRST_BYTES) or number == len(sizes):
            buckets.append(Bucket(filled, number / len(sizes)))
            filled = 0
    return Job(tuple(buckets))
