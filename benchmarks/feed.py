"""Normalising a batch on the CPU, beside the plain arithmetic: microseconds an image of one core.

python -m benchmarks.feed [--images 64] [--size 224] [--rounds 15]

Pixels come as the loader has them, uint8[B, H, W, 3]. "plain" is how it was done before, "passes"
is what is done now, "rounded" the same with bf16 to come out; "again" writes plain arithmetic into
the same memory each time: what pages that the system gives anew cost is the difference. The clock
is this thread's CPU time; the contenders take turns.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trainyard.data.device.normalise import Normalise

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def contenders(pixels_BCHW: Tensor, channels_last: bool) -> dict[str, Callable[[], Tensor]]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shift = torch.tensor(MEAN).mul(255).view(1, 3, 1, 1)
    scale = torch.tensor(STD).mul(255).reciprocal().view(1, 3, 1, 1)
    cpu = torch.device("cpu")
    passes, rounded = (
        Normalise(cpu, mean=MEAN, std=STD, channels_last=channels_last, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    kept = torch.empty(pixels_BCHW.shape, memory_format=layout)
    return {
        "plain": lambda: (
            pixels_BCHW.float().sub_(shift).mul_(scale).contiguous(memory_format=layout)
        ),
        "passes": lambda: passes(pixels_BCHW),
        "rounded": lambda: rounded(pixels_BCHW),
        "again": lambda: kept.copy_(pixels_BCHW).sub_(shift).mul_(scale),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Normalising on the CPU.")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = (args.images, args.size, args.size, 3)
    pixels_BCHW = torch.randint(0, 256, shape, dtype=torch.uint8).permute(0, 3, 1, 2)
    for channels_last in (True, False):
        run = contenders(pixels_BCHW, channels_last)
        times: dict[str, list[float]] = {name: [] for name in run}
        for _ in range(args.rounds):
            for name, normalised in run.items():
                start = time.thread_time()
                normalised()
                times[name].append((time.thread_time() - start) * 1e6 / args.images)
        print("channels last" if channels_last else "planes")
        usual = statistics.median(times["plain"])
        for name, found in times.items():
            median, quartiles = statistics.median(found), statistics.quantiles(found)
            spread = f"{quartiles[0]:.0f} to {quartiles[2]:.0f}"
            print(f"  {name:8} {median:6.0f} us ({spread}), {usual / median:.2f} times as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
