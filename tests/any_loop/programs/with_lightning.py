"""Lightning: two epochs, saved after each fifth step. A second start goes on."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from trainyard.torch import TorchLoader, loader

data, folder = sys.argv[1:]


class Linear(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        self.log("top1", (self.model(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class Data(lightning.LightningDataModule):
    def train_dataloader(self) -> TorchLoader:
        return loader(data, 64 // self.trainer.world_size, image_size=32)

    def val_dataloader(self) -> TorchLoader:
        return loader(data, 64, image_size=32, train=False)


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", "1")),
    callbacks=[ModelCheckpoint(folder, every_n_train_steps=5, save_last=True)],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Linear(), Data(), ckpt_path="last")
