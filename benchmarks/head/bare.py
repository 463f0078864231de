"""A training loop as it is usually written. DATA MODEL SIZE BATCH EPOCHS LR DECAY."""

import sys

import timm
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

data, name, *numbers = sys.argv[1:]
size, batch, epochs = map(int, numbers[:3])
lr, decay = map(float, numbers[3:])

normalise = [
    transforms.ToTensor(),
    transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]
crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
centre = [transforms.Resize(size), transforms.CenterCrop(size)]
train_data = ImageFolder(f"{data}/train", transforms.Compose(crop + normalise))
val_data = ImageFolder(f"{data}/val", transforms.Compose(centre + normalise))
train_loader = DataLoader(train_data, batch, shuffle=True, num_workers=2, drop_last=True)
val_loader = DataLoader(val_data, batch, num_workers=2)

model = timm.create_model(name, num_classes=len(train_data.classes))
groups: list[dict[str, object]] = [
    {"params": [p for p in model.parameters() if p.ndim > 1]},
    {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=decay)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
criterion = nn.CrossEntropyLoss()

for epoch in range(epochs):
    model.train()
    for images, labels in train_loader:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in val_loader:
            right += (model(images).argmax(dim=1) == labels).sum().item()
    print(f"epoch {epoch}: top-1 {right / len(val_data):.4f}", flush=True)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
        "checkpoint.pt",
    )
