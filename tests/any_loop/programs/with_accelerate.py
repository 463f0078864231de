"""accelerate: two epochs, saved after each fifth step. A second start goes on."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from trainyard.torch import loader

data, folder = sys.argv[1:]
saved = Path(folder) / "saved"
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
accelerator = Accelerator(cpu=True)

train = loader(data, 64 // accelerator.num_processes, image_size=32, device=accelerator.device)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(train)
if saved.exists():
    accelerator.load_state(saved)
for _ in range(train.state_dict()["epoch"], 2):
    for images, labels in train:
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
        if train.state_dict()["step"] % 5 == 0:
            accelerator.save_state(saved)
