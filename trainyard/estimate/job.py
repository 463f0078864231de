"""What a step computes and sends."""

from collections.abc import Sequence
from typing import NamedTuple

_FIRST_BYTES, _BYTES = 1 << 20, 25 << 20  # torch DDP's first bucket and its others
_FORWARD = 1 / 3  # of a step's compute; a backward pass takes about twice a forward pass


class Bucket(NamedTuple):
    num_bytes: float
    ready: float  # the part of the backward pass after which all of it is there


class Job(NamedTuple):
    buckets: tuple[Bucket, ...]  # in the order of the backward pass
    forward: float = _FORWARD

    @property
    def num_bytes(self) -> float:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def scaled(self, factor: float) -> "Job":
        """With messages of another size: compressed, say."""
        buckets = tuple(Bucket(b.num_bytes * factor, b.ready) for b in self.buckets)
        return self._replace(buckets=buckets)


def build_job(sizes: Sequence[int], *, bytes_per_weight: int = 4) -> Job:
    """From the number of weights in each parameter, in the order of the model.

    Buckets are filled as torch DDP fills them, from the last parameter to the first. How long the
    backward pass takes to a parameter goes by how many come after it: layers of one model take
    about as long as each other, while what they weigh differs by a hundred.
    """
    buckets: list[Bucket] = []
    filled = 0
    for number, size in enumerate(reversed(sizes), start=1):
        filled += size * bytes_per_weight
        if filled >= (_BYTES if buckets else _FIRST_BYTES) or number == len(sizes):
            buckets.append(Bucket(filled, number / len(sizes)))
            filled = 0
    return Job(tuple(buckets))
