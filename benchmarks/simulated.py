"""The replicas of a run in one process: its figures to rounding, in a third of the time.

Everything but the exchange is Trainyard's: order, augmentation, model, schedule, optimizer, loss
and evaluation. An exchange is a product of matrices, so this is a plain reference of the averagers
too: tests/benchmarks/test_loaders.py compares both.
"""

import time
from copy import deepcopy
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.fashion_mnist import RANKS_PER_NODE, Job, Run
from trainyard.averaging.config import DEFAULT_EVERY, DEFAULT_TOPOLOGY, AverageConfig
from trainyard.averaging.statistics import batch_norm_statistics
from trainyard.averaging.topology import rounds
from trainyard.config import load_recipe
from trainyard.data.batch import TENSORS, Batch
from trainyard.data.index.table import Index
from trainyard.data.sampler.plan import EndlessPlan
from trainyard.distributed import Heartbeat
from trainyard.files import RunDirectory
from trainyard.optim.groups import set_group_rates
from trainyard.optim.optimizers import build_optimizer
from trainyard.run.build import Parts, build_feeds, build_parts
from trainyard.training.evaluate import Evaluator
from trainyard.training.precision import AUTOCASTS, autocast
from trainyard.training.predictions import summary
from trainyard.world import World


def simulated(_rank: int, job: Job, _port: int, folder: Path) -> Run:
    """The figures of all ranks of a job, as of fashion_mnist.train_rank, by one thread."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    of_average = {key for key in job.keys if key.startswith("average.")}
    average = {key.removeprefix("average."): job.keys[key] for key in of_average}
    config = load_recipe("fashion-mnist", {k: job.keys[k] for k in job.keys.keys() - of_average})
    parts = build_parts(
        config,
        RunDirectory(folder),
        World(cores=1),
        console=Console(quiet=True),
        heartbeat=Heartbeat(),
    )
    index, order, course = parts.data.train, parts.order, parts.course
    assert isinstance(index, Index) and isinstance(order, EndlessPlan)
    replicas = Replicas(parts, AverageConfig(**average), job.ranks)
    feeds, distances = build_feeds(config, parts.world, parts.device), list[float | None]()
    with feeds.train(index, order, course) as feed:
        feed.seek(0, 0)
        for step in range(course.num_steps):
            replicas.step(next(feed), step)
            if step + 1 in (course.epoch_samples // config.batch.size, course.num_steps):
                distances.append(replicas.distance())
    replicas.take_mean()
    with feeds.evaluation(parts.data.val) as feed:
        evaluator = Evaluator(
            num_samples=len(parts.data.val),
            world=parts.world,
            device=parts.device,
            precision=replicas.precision,
        )
        found = evaluator.predictions({"": parts.model.eval()}, feed)
    figures = summary(found, parts.data.val.label)
    return {
        "top1": figures["top1"],
        "loss": figures["loss"],
        "distances": distances,
        "steps": course.num_steps,
        "seconds": round(time.perf_counter() - begun, 1),
    }


class Replicas:
    """Copies of a model, whose parameters and gradients are the rows of two matrices."""

    def __init__(self, parts: Parts, average: AverageConfig, size: int) -> None:
        if average.name == "sharded" or average.compress or average.outer_lr:
            raise ValueError(f"no simulation of {average}")
        self.parts, self.average, self.size = parts, average, size
        self.precision = AUTOCASTS[parts.config.batch.precision]
        parts.model.train()
        self.models = [deepcopy(parts.model) for _ in range(size)]
        first = torch.cat([p.detach().flatten() for p in parts.model.parameters()])
        self.weights = first.repeat(size, 1)  # [replicas, parameters]
        self.gradients = torch.zeros_like(self.weights)
        for model, weights, gradient in zip(self.models, self.weights, self.gradients, strict=True):
            sizes = [parameter.numel() for parameter in model.parameters()]
            rows = zip(weights.split(sizes), gradient.split(sizes), strict=True)
            for parameter, (own, of_own) in zip(model.parameters(), rows, strict=True):
                parameter.data, parameter.grad = own.view_as(parameter), of_own.view_as(parameter)
        self.optimizers = [build_optimizer(model, parts.config.optim) for model in self.models]
        topology = average.topology or DEFAULT_TOPOLOGY
        found = rounds(topology if average.name == "gossip" else "complete", size, RANKS_PER_NODE)
        self.mixings = [_matrix(groups, size) for groups in found]

    def step(self, batch: Batch, step: int) -> None:
        """A step of all replicas; `batch` is the global one, dealt to them in turns."""
        self.gradients.zero_()
        for number, model in enumerate(self.models):
            own = slice(number, None, self.size)
            share = Batch(**{name: getattr(batch, name)[own] for name in TENSORS})
            with autocast(self.parts.device, self.precision):
                logits = model(share.images_BCHW)
            self.parts.loss(logits.float(), share).mean().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._exchange_and_update(step)

    def _exchange_and_update(self, step: int) -> None:
        average, mixing = self.average, self.mixings[step % len(self.mixings)]
        overlaps = average.name == "gossip" and average.overlap is not False
        waits = average.name == "gossip" and not overlaps
        if average.name == "periodic":
            waits = (step + 1) % (average.every or DEFAULT_EVERY) == 0
        if average.name == "allreduce":
            self.gradients.copy_(mixing @ self.gradients)
        if overlaps:
            self.weights.copy_(mixing @ self.weights)
        self._update(step)
        if waits:
            self.weights.copy_(mixing @ self.weights)

    def _update(self, step: int) -> None:
        rates = self.parts.schedule(step)
        for optimizer in self.optimizers:
            set_group_rates(optimizer, lr=rates.lr, weight_decay=rates.weight_decay)
            optimizer.step()

    def distance(self) -> float | None:
        """As the metric consensus_distance; None where replicas are equal."""
        if self.average.name == "allreduce":
            return None
        apart = self.weights - self.weights.mean(0)
        return float(apart.square().sum(1).mean().sqrt())

    @torch.no_grad()
    def take_mean(self) -> None:
        """Puts the mean of the replicas into the model of the parts."""
        each = [[*model.parameters(), *batch_norm_statistics(model)] for model in self.models]
        mean = self.parts.model
        for into, *tensors in zip(
            [*mean.parameters(), *batch_norm_statistics(mean)], *each, strict=True
        ):
            into.copy_(torch.stack(tensors).mean(0))


def _matrix(groups: list[tuple[int, ...]], size: int) -> Tensor:
    """Row i has the shares of the replicas in the new weights of replica i."""
    mixing = torch.zeros(size, size)
    for group in groups:
        mixing[torch.tensor(group)[:, None], torch.tensor(group)] = 1 / len(group)
    return mixing
