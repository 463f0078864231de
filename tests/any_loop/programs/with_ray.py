"""Ray Train: two epochs, saved after each fifth step. A worker that was killed goes on."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from tests.any_loop.recorded import record_optimizers
from trainyard.torch import loader

data, folder, ranks = sys.argv[1:]


def work(config: dict[str, str]) -> None:
    os.environ |= config
    record_optimizers()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    context = ray.train.get_context()
    train = loader(data, 64 // context.get_world_size(), image_size=32)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as place:
            saved = torch.load(Path(place) / "saved.pt")
        model.load_state_dict(saved[0]), optimizer.load_state_dict(saved[1])
        train.load_state_dict(saved[2])
    for epoch in range(train.state_dict()["epoch"], 2):
        for images, labels in train:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if train.state_dict()["step"] % 5:
                continue
            with TemporaryDirectory() as place:
                states = model.state_dict(), optimizer.state_dict(), train.state_dict()
                torch.save(states, Path(place) / "saved.pt")
                saved = ray.train.Checkpoint.from_directory(place)
                is_first = context.get_world_rank() == 0
                ray.train.report({"epoch": epoch}, checkpoint=saved if is_first else None)


trainer = TorchTrainer(
    work,
    train_loop_config={name: os.environ[name] for name in ("LOG", "KILL_AFTER")},
    scaling_config=ray.train.ScalingConfig(num_workers=int(ranks)),
    run_config=ray.train.RunConfig(
        storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=1)
    ),
)
trainer.fit()
