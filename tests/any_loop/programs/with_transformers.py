"""Transformers' Trainer: two epochs, saved after each fifth step. A second start goes on."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from trainyard.torch import TorchLoader, loader

data, folder = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
args = TrainingArguments(
    folder,
    use_cpu=True,
    num_train_epochs=2,
    learning_rate=0.01,
    save_steps=5,
    ignore_data_skip=True,
    report_to=[],
    disable_tqdm=True,
)
train = loader(data, 64 // args.world_size, image_size=32)


class OurTrainer(Trainer):
    def get_train_dataloader(self) -> TorchLoader:
        return train

    def compute_loss(self, model: nn.Module, inputs: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        images, labels = inputs
        return nn.functional.cross_entropy(model(images), labels)


class Position(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.save(train.state_dict(), f"{args.output_dir}/checkpoint-{state.global_step}/data.pt")


trainer = OurTrainer(model, args, callbacks=[Position()])
last = get_last_checkpoint(folder)
if last:
    train.load_state_dict(torch.load(f"{last}/data.pt"))
trainer.train(resume_from_checkpoint=last)
