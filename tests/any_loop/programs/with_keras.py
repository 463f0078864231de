"""Keras: two epochs, saved after each fifth step. A second start goes on."""

import json
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
import keras

from tests.any_loop.recorded import after_step
from trainyard.numpy import loader

data, folder = sys.argv[1:]
saved, position = Path(folder) / "last.keras", Path(folder) / "position.json"
keras.utils.set_random_seed(0)

train = loader(data, 64, image_size=32)
if saved.exists():
    model = keras.saving.load_model(saved)
    train.load_state_dict(json.loads(position.read_text()))
else:
    model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten()])
    model.add(keras.layers.Dense(10, activation="softmax"))
    model.compile(keras.optimizers.SGD(0.01, 0.9), "sparse_categorical_crossentropy")
for _ in range(train.state_dict()["epoch"], 2):
    for images, labels in train:
        model.train_on_batch(images, labels)
        after_step(model.get_weights())
        if train.state_dict()["step"] % 5 == 0:
            model.save(saved)
            position.write_text(json.dumps(train.state_dict()))
