"""Every averager on real ranks, beside its rule written out for ranks that one process plays."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

from tests.spawn import spawn
from tests.steps import CPU, build_update
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.gossip import Gossip
from trainyard.averaging.sharded import gathered
from trainyard.averaging.topology import rounds
from trainyard.config import load_recipe
from trainyard.run.build import build_averager
from trainyard.training.update import clip_by_norm
from trainyard.world import World

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
Keys = dict[str, Any]
STEPS = 7
LR, MOMENTUM, CLIP = 0.2, 0.9, 0.3
STAR = "tests.averaging.test_topology:star"  # in which some rest
PERIODIC: Keys = {"name": "periodic", "every": 3}
BF16: Keys = {"compress": "bf16"}
RULES: dict[str, Keys] = {
    "all-reduce": {},
    "sharded": {"name": "sharded"},
    "periodic": PERIODIC,
    "periodic, in every step": {"name": "periodic", "every": 1},
    "DiLoCo": PERIODIC | {"outer_lr": 0.7, "outer_momentum": 0.9},
    "outer momentum alone": PERIODIC | {"outer_momentum": 0.5},
}
EXPONENTIAL = "one-peer-exponential"


def gossiping(topology: str, **keys: Any) -> Keys:
    return {"name": "gossip", "topology": topology, **keys}


ON_FOUR = RULES | {
    "complete": gossiping("complete"),
    "ring": gossiping("ring"),
    "ring, no overlap": gossiping("ring", overlap=False),
    "exponential": gossiping(EXPONENTIAL, overlap=True),
    "exponential, no overlap": gossiping(EXPONENTIAL, overlap=False),
    "alternating": gossiping("alternating-exponential-ring"),
    "complete, bf16": gossiping("complete", **BF16),
    "exponential, no overlap, bf16": gossiping(EXPONENTIAL, overlap=False, **BF16),
}
ON_THREE = RULES | {
    "ring": gossiping("ring"),
    "complete": gossiping("complete"),
    "star": gossiping(STAR),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def samples(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64) + 0.2 * rank
    return images, torch.randint(3, (4,), generator=generator)


def flat(model: nn.Module) -> Array:
    parts = [gathered(parameter.detach()).numpy().ravel() for parameter in model.parameters()]
    return np.concatenate(parts)


def on_two_nodes(world: World) -> World:
    node, local_rank = divmod(world.rank, world.size // 2)
    local_size = world.size // 2
    return replace(world, local_rank=local_rank, local_size=local_size, node=node, num_nodes=2)


class Replica:
    """A model that goes on step by step."""

    def __init__(self, world: World, keys: Keys, optimizer: str = "sgd") -> None:
        torch.set_num_threads(1)
        self.world, self.model = world, model_of()
        world = on_two_nodes(world) if world.size == 4 else world
        config = load_recipe("debug").model_copy(update={"average": AverageConfig(**keys)})
        self.averager: Any = (
            Gossip(config.average, world, bucket_bytes=300)  # so that there are several
            if config.average.name == "gossip"
            else build_averager(config, world, CPU)
        )
        self.wrapped = self.averager.wrap(self.model)
        parameters = self.model.parameters()
        made: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(parameters, LR, MOMENTUM),
            "sgd, fused": lambda: torch.optim.SGD(parameters, LR, MOMENTUM, fused=True),
            "adamw, fused": lambda: torch.optim.AdamW(parameters, 0.01, fused=True),
        }
        self.update = build_update(self.model, made[optimizer](), clip=clip_by_norm(CLIP))

    def backward(self, step: int) -> None:
        images, labels = samples(step, self.world.rank)
        divisor = self.averager.divisor(torch.tensor(4.0))
        loss = F.cross_entropy(self.wrapped(images), labels, reduction="sum")
        (loss / divisor()).backward()

    def train(self, *, divided: Callable[[int], bool] | None = None) -> list[Array]:
        """The weights after each step; `divided`: whether a step goes bucket by bucket."""
        found = []
        for step in range(STEPS):
            self.backward(step)
            ready = self.averager.ready_parameters
            if divided is None:
                self.update(step, ready)
            else:
                is_divided = divided(step)
                self.update(step, lambda step, _: ready(step, is_divided))  # noqa: B023
            found.append(flat(self.model))
        with self.averager.consensus():  # nothing stays under way
            return found


# --- the rules ---


def simulate(size: int, local_size: int, keys: Keys) -> list[list[Array]]:
    """The same steps in one process: weights[rank] after each."""
    name, model = keys.get("name", "allreduce"), model_of()
    weights = [flat(model)] * size
    velocities, outer = [np.zeros_like(weights[0])] * size, np.zeros_like(weights[0])
    anchor, history = weights[0], []
    for step in range(STEPS):
        grads = [gradient(model, weights[rank], *samples(step, rank)) for rank in range(size)]
        if name in ("allreduce", "sharded"):
            grads = [np.mean(grads, axis=0)] * size
        clipped = [grad * min(1, CLIP / (np.linalg.norm(grad) + 1e-6)) for grad in grads]
        velocities = [MOMENTUM * v + grad for v, grad in zip(velocities, clipped, strict=True)]
        overlaps = keys.get("overlap") is not False
        if name == "gossip" and overlaps:
            weights = mixed(weights, step, local_size, keys)
        weights = [own - LR * v for own, v in zip(weights, velocities, strict=True)]
        if name == "gossip" and not overlaps:
            weights = mixed(weights, step, local_size, keys)
        if name == "periodic" and (step + 1) % keys["every"] == 0:
            momentum, mean = keys.get("outer_momentum", 0.0), np.mean(weights, axis=0)
            outer = momentum * outer + (anchor - mean)
            anchor = anchor - keys.get("outer_lr", 1.0) * (anchor - mean + momentum * outer)
            weights = [anchor] * size
        history.append(weights)
    return [list(of_rank) for of_rank in zip(*history, strict=True)]


def mixed(weights: list[Array], step: int, local_size: int, keys: Keys) -> list[Array]:
    """Each rank moves as the mean of its group is from what it sends itself."""
    found = rounds(keys["topology"], len(weights), local_size)
    groups = found[step % len(found)]
    mine = [next(group for group in groups if rank in group) for rank in range(len(weights))]
    sent = [halved(own) if "compress" in keys else own for own in weights]
    means = [np.mean([sent[peer] for peer in group], axis=0) for group in mine]
    moves = [mean - own for mean, own in zip(means, sent, strict=True)]
    return [own + move for own, move in zip(weights, moves, strict=True)]


def halved(weights: Array) -> Array:
    rounded: Array = torch.from_numpy(weights).to(torch.bfloat16).double().numpy()
    return rounded


def gradient(model: nn.Module, weights: Array, images: Tensor, labels: Tensor) -> Array:
    vector_to_parameters(torch.from_numpy(weights), model.parameters())
    loss = F.cross_entropy(model(images), labels)
    grads = torch.autograd.grad(loss, [*model.parameters()])
    return np.concatenate([grad.numpy().ravel() for grad in grads])


def train_each(world: World, ways: dict[str, Keys]) -> dict[str, list[Array]]:
    return {way: Replica(world, keys).train() for way, keys in ways.items()}


@pytest.mark.parametrize(("size", "ways"), [(4, ON_FOUR), (3, ON_THREE)], ids=["4", "3"])
def test_the_rule_written_out(size: int, ways: dict[str, Keys]) -> None:
    ranks = spawn(train_each, size, ways)
    for way, keys in ways.items():
        expected = simulate(size, 2 if size == 4 else size, keys)
        for rank in range(size):
            np.testing.assert_allclose(
                ranks[rank][way], expected[rank], rtol=1e-12, atol=1e-13, err_msg=way
            )
        apart = np.abs(expected[0][-1] - expected[-1][-1]).max()
        if keys.get("name") == "gossip":
            assert apart > 1e-3  # it is no easy case
        assert np.abs(expected[0][-1] - expected[0][0]).max() > 0.01


# --- bucket by bucket: what is updated is sent while the rest is not yet updated ---

DIVIDED = [
    gossiping("complete"),
    gossiping(EXPONENTIAL),
    gossiping(STAR),
    gossiping("complete", **BF16),
    gossiping("ring", overlap=False),
]


def train_divided(world: World) -> list[bool]:
    # A replica may go back and forth by itself.
    ways: list[Callable[[int], bool]] = [lambda step: bool(step % 3 or world.rank > 1)]
    ways.append(lambda step: False)
    found = []
    for keys in DIVIDED:
        for name in ("sgd, fused", "adamw, fused"):
            one, other = (Replica(world, keys, name).train(divided=way) for way in ways)
            found.append(np.array_equal(one, other))
    return found


def test_part_by_part_is_the_same_bit_by_bit() -> None:
    assert spawn(train_divided, 4) == [[True] * 2 * len(DIVIDED)] * 4
