"""A model of the user's own: a function in the working directory that returns it."""

import inspect
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from torch import nn

from trainyard.errors import RecipeError
from trainyard.image_size import ImageSize
from trainyard.model.config import ModelConfig
from trainyard.own_code import as_recipe_error, imported

KEY = "model.name"


def build_own_model(
    config: ModelConfig, *, num_classes: int, image_size: ImageSize, channels: int
) -> nn.Module:
    """The model that the function in `model.name` returns.

    It is called as timm's create_model is: with num_classes, model.options, with drop_path_rate if
    `model.drop_path` is set, and with img_size and in_chans if it has such parameters. The
    arguments besides num_classes are recorded in the model, where timm records its own. RecipeError
    if the function cannot be imported, does not take these arguments, fails, or returns something
    else.
    """
    function = imported(KEY, config.name)
    options: dict[str, Any] = dict(config.options)
    if config.drop_path is not None:
        options["drop_path_rate"] = config.drop_path
    named: Collection[str] = ()
    with suppress(TypeError, ValueError):  # written in C
        named = inspect.signature(function).parameters
    if "img_size" in named:
        options["img_size"] = image_size
    if "in_chans" in named:
        options["in_chans"] = channels
    model = called(config.name, {"num_classes": num_classes, **options})
    model.__dict__["_model_args"] = options
    return model


def called(name: str, arguments: dict[str, Any]) -> nn.Module:
    """The model of a function with these arguments; RecipeError if it fails or is no model."""
    function = imported(KEY, name)
    with as_recipe_error(KEY, name):
        model = function(**arguments)
    if not isinstance(model, nn.Module):
        raise RecipeError(
            "function.wrong-type",
            key=KEY,
            value=name,
            type=type(model).__name__,
            wanted="a torch.nn.Module",
        )
    return model
