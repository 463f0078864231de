"""What the composition root hands to the parts of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainyard.averaging.allreduce import AllReduce
from trainyard.config import load_recipe
from trainyard.course import build_course
from trainyard.distributed import Watchdog
from trainyard.files import RunDirectory
from trainyard.monitor.sinks import Sinks
from trainyard.run import train
from trainyard.run.pretrained import Beginning
from trainyard.world import World

META = torch.device("meta")


class Pieces(AllReduce):
    """As `sharded`: the model is on the CPU until it is wrapped."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return super().wrap(model.to(META))


class Samples(list[int]):
    classes = ("a", "b")
    has_names = False


class Feeds(Exception):
    """The device for which feeds were asked for."""


def test_all_is_on_the_ranks_device_though_the_model_is_not_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe("debug")
    course = build_course("2 steps", epoch_samples=16, batch=8, image_size=32)
    seen = []

    def note(run: Any, averager: Any, ema: Any) -> Any:
        seen.append(state_of(run, averager, ema))
        return seen[0]

    def feeds(config: Any, world: Any, device: torch.device) -> None:
        raise Feeds(device)

    state_of = train._state
    monkeypatch.setattr(train, "_state", note)
    monkeypatch.setattr(train, "build_feeds", feeds)
    data = SimpleNamespace(train=Samples(), val=Samples())
    run = train._Run(
        config=config,
        folder=RunDirectory(tmp_path),
        world=World(),
        device=META,
        averager=Pieces(config.average, World()),
        data=data,  # type: ignore[arg-type]
        order=None,  # type: ignore[arg-type]
        course=course,
        schedule=None,  # type: ignore[arg-type]
        model=nn.Linear(2, 2),
        begun=Beginning(),
        loss=None,  # type: ignore[arg-type]
    )
    watch = Watchdog()
    with pytest.raises(Feeds) as asked:
        train._train_in(run, Sinks(()), watch)
    watch.close(in_peace=True)
    assert asked.value.args == (META,)
    assert seen[0].scale.value.device == META
