"""What a run and `data verify` make of locations."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainyard.data.config import DataConfig
from trainyard.data.index.build import Progress
from trainyard.data.open_datasets import Datasets, open_datasets
from trainyard.world import World


@contextmanager
def silent(what: str, total: int | None) -> Iterator[Progress]:
    yield lambda *_: None


def opened(train: object, val: object, **others: object) -> Datasets:
    config = DataConfig.model_validate({"train": train, "val": val, **others})
    return open_datasets(config, World(), lambda *_: None)
