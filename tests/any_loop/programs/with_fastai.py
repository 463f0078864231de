"""fastai: two epochs, saved after each fifth step. A second start goes on."""

import os
import sys
from functools import partial
from pathlib import Path

import torch
from fastai.callback import progress  # noqa: F401  # no_bar
from fastai.data.core import DataLoaders
from fastai.learner import Callback, Learner
from fastai.optimizer import OptimWrapper
from torch import distributed, nn

from trainyard.torch import loader

data, folder = sys.argv[1:]
ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
if ranks > 1:
    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)

train = loader(data, 64 // ranks, image_size=32)
val = loader(data, 64, image_size=32, train=False)


class Position(Callback):
    def after_batch(self):
        if self.training and train.state_dict()["step"] % 5 == 0:
            self.learn.save("last")
            torch.save(train.state_dict(), file)


sgd = partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9)
learn = Learner(DataLoaders(train, val), model, nn.CrossEntropyLoss(), opt_func=sgd, path=folder)
learn.add_cb(Position())
file = Path(folder) / "models" / "data.pt"
if file.exists():
    learn.load("last")
    train.load_state_dict(torch.load(file))
with learn.no_bar():
    learn.fit(2, 0.01, start_epoch=train.state_dict()["epoch"])
