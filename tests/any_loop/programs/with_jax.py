"""JAX, in one process or two: two epochs, saved after each fifth step. A second start goes on."""

import os
import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.any_loop.recorded import after_step
from trainyard.numpy import loader

data, folder = sys.argv[1:]
saved = Path(folder) / "last.pickle"
if "RANK" in os.environ:
    address = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    jax.distributed.initialize(address, ranks, rank)


@jax.jit
def step(weights, images, labels):
    def loss(weights):
        logits = images.reshape(len(images), -1) @ weights
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    return weights - 0.01 * jax.grad(loss)(weights)


rank, ranks = jax.process_index(), jax.process_count()
train = loader(data, 64 // ranks, image_size=32, rank=rank, world_size=ranks)
shared = NamedSharding(Mesh(np.array(jax.devices()), "ranks"), PartitionSpec("ranks"))
weights = np.zeros((3072, 10), np.float32)
if saved.exists():
    weights, position = pickle.loads(saved.read_bytes())
    train.load_state_dict(position)
for _ in range(train.state_dict()["epoch"], 2):
    for batch in train:
        weights = step(weights, *(jax.make_array_from_process_local_data(shared, a) for a in batch))
        after_step([np.asarray(weights)])
        if train.state_dict()["step"] % 5 == 0 and rank == 0:
            saved.write_bytes(pickle.dumps((np.asarray(weights), train.state_dict())))
