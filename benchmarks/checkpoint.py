"""Steps with a checkpoint every 20 of them: written at once, written beside training, not written.

python -m benchmarks.checkpoint FOLDER [--models resnet50] [--batch 4] [--size 96] [--threads 1]
    [--rounds 5] [--device cpu] [--hardware NAME]

FOLDER is where checkpoints go: give one on the disk of your runs. In a round each way makes 40
steps in turn, with saves after the first and the 21st; the clock stops with the 40th. The way
`beside` waits for its last checkpoint after that, untimed, so that none is written while another
way is measured. `--threads`: those of torch; with fewer than the machine has cores, the thread
that writes has a core of its own, as it has where GPUs train.
"""

import argparse
import gc
import resource
import shutil
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import timm
import torch
from torch.nn.functional import cross_entropy

from benchmarks.saving import listed, save
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.monitor.clock import Clock
from trainyard.training.checkpoint import TrainState
from trainyard.training.guard import Guard
from trainyard.training.saver import Saver
from trainyard.training.update import DynamicLossScale
from trainyard.world import World

STEPS, EVERY = 40, 20
WAYS = ("none", "at once", "beside")
OPTIMIZERS = {"resnet50": "sgd", "vit_base_patch16_224": "adamw"}


def state_of(options: argparse.Namespace, name: str) -> TrainState:
    torch.manual_seed(0)
    size = {"img_size": options.size} if "vit" in name else {}
    model = timm.create_model(name, num_classes=1000, **size).to(options.device)
    if OPTIMIZERS.get(name, "sgd") == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=True)
    averager, device = AllReduce(AverageConfig(), World()), torch.device(options.device)
    averager.wrap(model.train())
    return TrainState(
        model=model,
        optimizer=optimizer,
        averager=averager,
        emas={},
        scale=DynamicLossScale(device),
        guard=Guard(device, limit=3),
        clock=Clock(),
        classes=[str(number) for number in range(1000)],
    )


def steps(options: argparse.Namespace, state: TrainState, way: str, folder: Path) -> float:
    """Seconds of 40 steps and what is saved within them."""
    shape = (options.batch, 3, options.size, options.size)
    images, labels = torch.randn(shape).to(options.device), torch.arange(options.batch)
    labels = labels.to(options.device)
    with Saver(folder, World(), keep=1) as saver:
        wait(options)
        begun = time.perf_counter()
        for step in range(STEPS):
            torch.autograd.backward(cross_entropy(state.model(images), labels))
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
            if step % EVERY == 0 and way != "none":
                saver.save(state)
            if way == "at once":
                saver.wait()
        wait(options)
        return time.perf_counter() - begun


def wait(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    state = state_of(options, name)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    memory: dict[str, int] = {}
    for round_ in range(options.rounds + 1):
        for way in WAYS[round_ % 3 :] + WAYS[: round_ % 3]:
            took = steps(options, state, way, options.folder / way)
            if round_:  # the first one warms up
                seconds[way].append(took / STEPS)
            memory.setdefault(way, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    size = sum(file.stat().st_size for file in (options.folder / "beside").glob("latest/*"))
    for way in WAYS:
        shutil.rmtree(options.folder / way, ignore_errors=True)
    del state
    gc.collect()
    ratios = {
        way: [with_ / without for with_, without in zip(seconds[way], seconds["none"], strict=True)]
        for way in WAYS[1:]
    }
    return {
        "model": name,
        "checkpoint_bytes": size,
        "seconds_per_step": seconds,
        "ratios": ratios,
        "peak_rss_after_first_round": memory,
    }


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | checkpoint | s a step, none | at once, ratio | beside, ratio |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        ratios = [
            f"{statistics.median(r):.3f} ({min(r):.3f} to {max(r):.3f})"
            for r in result["ratios"].values()
        ]
        none = statistics.median(result["seconds_per_step"]["none"])
        size = f"{result['checkpoint_bytes'] / 1e6:,.0f} MB"
        lines.append(f"| {result['model']} | {size} | {none:.3f} | {ratios[0]} | {ratios[1]} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=[*OPTIMIZERS])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hardware", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [measure(options, name) for name in options.models]
    facts = {
        "date": date.today(),
        "torch": torch.__version__,
        "device": options.device,
        "threads": options.threads,
        "batch": options.batch,
        "size": options.size,
        "rounds": options.rounds,
    }
    text = "\n".join(
        [f"# {options.hardware or 'Checkpoints'}", "", listed(facts), "", *table(results)]
    )
    print(text)
    if options.hardware:
        name = f"{options.hardware}-checkpoint-{options.threads}-threads"
        save(
            name,
            {key: str(fact) for key, fact in facts.items()} | {"results": results},
            text + "\n",
        )


if __name__ == "__main__":
    main()
