"""What the composition root hands to the parts of a run."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from trainyard.averaging.allreduce import AllReduce
from trainyard.config import load_recipe
from trainyard.course import build_course
from trainyard.distributed import Watchdog
from trainyard.files import RunDirectory
from trainyard.run.build import Parts
from trainyard.run.loggers import Loggers
from trainyard.run.pretrained import InitialWeights
from trainyard.run.trainer import Trainer
from trainyard.world import World

META = torch.device("meta")


class Pieces(AllReduce):
    """As `sharded`: the model is on the CPU until it is wrapped."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return super().wrap(model.to(META))


class Samples(list[int]):
    classes = ("a", "b")
    has_names = False


def test_all_is_on_the_ranks_device_though_the_model_is_not_yet(tmp_path: Path) -> None:
    config = load_recipe("debug")
    course = build_course("2 steps", epoch_samples=16, batch=8, image_size=32)
    parts = Parts(
        config=config,
        folder=RunDirectory(tmp_path),
        world=World(),
        device=META,
        averager=Pieces(config.average, World()),
        data=SimpleNamespace(train=Samples(), val=Samples()),  # type: ignore[arg-type]
        order=None,  # type: ignore[arg-type]
        course=course,
        schedule=None,  # type: ignore[arg-type]
        model=nn.Linear(2, 2),
        initial=InitialWeights(),
        loss=None,  # type: ignore[arg-type]
        loss_files={},
    )
    watchdog = Watchdog()
    trainer = Trainer(parts, Loggers(), watchdog)
    watchdog.close()
    assert trainer.state.scale.value.device == META
    assert next(trainer.wrapped.parameters()).device == META
