"""Decode, crop at random, resize and flip in Python: for peers that leave it to their users.

simplejpeg and torch, the fastest that pip has and that gives Pillow's pixels.
"""

import random

import simplejpeg
import torch
from torch import Tensor

from benchmarks.loaders.peers.functions import Box, cropped

_LOG_RATIO = 0.28768207245178085  # log(4 / 3)


def random_box(width: int, height: int) -> Box:
    """As torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = 2.718281828459045 ** random.uniform(-_LOG_RATIO, _LOG_RATIO)
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def random_image(content: bytes) -> Tensor:
    """uint8[224, 224, 3]"""
    image = simplejpeg.decode_jpeg(content, "RGB")
    box = random_box(image.shape[1], image.shape[0])
    return torch.from_numpy(cropped(image, box, random.random() < 0.5))
