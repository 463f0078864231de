"""A program in this process, seeded, which notes when its first update ends.

python -m benchmarks.head.watched FILE SEED PROGRAM [ARGUMENTS ...]

PROGRAM is the path of a script or the name of a module. torchvision's reference builds models of
torchvision's own register by name: timm's small ones are put there, and resnet18 replaced.
"""

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch.optim.optimizer import register_optimizer_step_post_hook

MODELS = ("test_resnet", "test_vit", "resnet18")


def register(name: str) -> None:
    def build(weights: Any = None, **options: Any) -> torch.nn.Module:
        assert weights is None
        return timm.create_model(name, **options)

    torchvision.models._api.BUILTIN_MODELS[name] = build


def main() -> None:
    file, seed, program, *arguments = sys.argv[1:]

    def note(*_: Any) -> None:
        hook.remove()
        Path(file).write_text(repr(time.time()))

    hook = register_optimizer_step_post_hook(note)
    torch.manual_seed(int(seed))
    for name in MODELS:
        register(name)
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)  # as `python PROGRAM` has it
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
