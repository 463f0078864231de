"""A timm model by name, or one of the user, checked for the image sizes that it will get."""

import re
from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from trainyard.errors import RecipeError
from trainyard.image_size import ImageSize, as_size, height_width, size_text
from trainyard.model.catalogue import check_name
from trainyard.model.config import ModelConfig
from trainyard.model.own import build_own_model
from trainyard.own_code import is_own

# Options of timm that belong to another recipe key or are not configurable.
_ELSEWHERE = {
    "num_classes": "the data says it",
    "in_chans": "say data.channels",
    "img_size": "say data.image_size",
    "drop_path_rate": "say model.drop_path",
    "pretrained": 'say model.checkpoint = "timm"',
    "checkpoint_path": "say model.checkpoint",
}
# Options that make models of a fixed image size accept several, in order of preference.
_FLEXIBLE: tuple[dict[str, bool], ...] = (
    {"dynamic_img_size": True},
    {"strict_img_size": False},
    {},  # some accept them without an option
)


def build_model(
    config: ModelConfig,
    *,
    num_classes: int,
    image_size: ImageSize,
    other_sizes: Collection[ImageSize] = (),
    channels: int = 3,
) -> nn.Module:
    """The model on the CPU, freshly initialised from torch's random state.

    It accepts images of `channels`, of `image_size`, the size of its position embeddings, and of
    each of `other_sizes`. RecipeError if there is no such model, or none with these options or
    sizes.
    """
    for option in config.options:
        if option in _ELSEWHERE:
            raise RecipeError(
                "model.option-elsewhere",
                "model.options: {name} does not belong there: {hint}",
                name=option,
                hint=_ELSEWHERE[option],
            )
    if is_own(config.name):
        model = build_own_model(
            config, num_classes=num_classes, image_size=image_size, channels=channels
        )
    else:
        data_options = {"num_classes": num_classes} | (
            {} if channels == 3 else {"in_chans": channels}
        )
        model = _of_timm(config, data_options, image_size, other_sizes)
    for size in (image_size, *sorted(other_sizes, key=height_width)):
        _check_patches(model, config, size)
        _check_images(model, config, (channels, *height_width(size)), num_classes)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(memory_format=layout)


def _of_timm(
    config: ModelConfig,
    data_options: dict[str, int],
    image_size: ImageSize,
    other_sizes: Collection[ImageSize],
) -> nn.Module:
    """`data_options`: options that follow from the data."""
    import timm

    from trainyard.model import plain_vit, whitened_convnet  # noqa: F401  # timm learns their names

    check_name(config.name)
    options: dict[str, Any] = {**data_options, **config.options}
    if config.drop_path is not None:
        options["drop_path_rate"] = config.drop_path
    option_sets: tuple[dict[str, bool], ...] = ({},)
    pretrained_cfg = timm.get_pretrained_cfg(config.name)
    if pretrained_cfg is not None and pretrained_cfg.fixed_input_size:
        options["img_size"] = image_size
        if any(size != image_size for size in other_sizes):
            option_sets = _FLEXIBLE
    for more in option_sets:  # the first that its constructor accepts
        try:
            return timm.create_model(config.name, **{**more, **options})
        except Exception as error:
            match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            refused = match[1] if match and isinstance(error, TypeError) else None
            if refused not in more:
                raise _not_built(error, refused, config) from error
    raise AssertionError("the last set has no further options")


def _check_images(
    model: nn.Module, config: ModelConfig, of_image: tuple[int, int, int], num_classes: int
) -> None:
    """RecipeError unless the model maps an image, of channels, height and width, to one score per
    class.

    Tried on torch's meta device; if that fails, also with real data, to be sure.
    """
    shape = (1, *of_image)
    named = chain(model.named_parameters(), model.named_buffers())
    shapes = {key: torch.empty_like(tensor, device="meta") for key, tensor in named}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            try:
                scores = functional_call(model, shapes, torch.empty(shape, device="meta"))
            except Exception:
                scores = model(torch.zeros(shape))
    except Exception as error:
        raise _not_accepted(error, config, of_image) from error
    finally:
        model.train(was_training)
    shape_found = getattr(scores, "shape", None)
    if is_own(config.name) and shape_found != (1, num_classes):
        given = (
            type(scores).__name__ if shape_found is None else f"scores of shape {list(shape_found)}"
        )
        raise RecipeError(
            "function.wrong-scores",
            "model.name: {name} gives {found} for one image: return one score per class, [1, "
            "{num_classes}]",
            name=config.name,
            found=given,
            num_classes=num_classes,
        )
    if shape_found != (1, num_classes):
        raise RecipeError(
            "model.wrong-scores",
            "model.options: {name} does not give one score per class with these options",
            name=config.name,
        )


def _not_accepted(
    error: Exception, config: ModelConfig, of_image: tuple[int, int, int]
) -> RecipeError:
    name, reason = config.name, _first_line(error)
    hint = "other model.options" if config.options else "another model"
    channels, size = of_image[0], size_text(as_size(*of_image[1:]))
    more = "" if channels == 3 else f" and {channels} channels, as in data.channels"
    return RecipeError(
        "model.images-not-accepted",
        "model.name: {name} does not accept images of {size} pixels{more} ({reason}): choose "
        "{hint}, or other data.image_size, data.eval_size, schedule.image_size",
        name=name,
        size=size,
        more=more,
        reason=reason,
        hint=hint,
    )


def _check_patches(model: nn.Module, config: ModelConfig, size: ImageSize) -> None:
    """RecipeError if the patches of a transformer do not cover images of `size`.

    timm crops a remainder that is smaller than a patch, without an error.
    """
    from timm.layers import PatchEmbed

    patches = getattr(model, "patch_embed", None)
    if not isinstance(patches, PatchEmbed) or patches.dynamic_img_pad:
        return
    for patch, side in zip(patches.patch_size, height_width(size), strict=True):
        below, left = side // patch * patch, side % patch
        if left:
            raise RecipeError(
                "model.patches-leave-pixels",
                "model.name: {name} cuts images into patches of {patch} pixels and would leave "
                "out the last {left} of {side} pixels: choose {sizes} for data.image_size, "
                "data.eval_size, schedule.image_size",
                name=config.name,
                patch=patch,
                left=left,
                side=side,
                sizes=f"{below} or {below + patch}" if below else f"{patch}",
            )


def _not_built(error: Exception, refused: str | None, config: ModelConfig) -> RecipeError:
    name, options = config.name, config.options
    keys = {"drop_path_rate": "model.drop_path"}
    keys |= {"img_size": "data.image_size", "in_chans": "data.channels"}
    if refused in keys:
        return RecipeError(
            "model.key-not-taken",
            "model.name: {name} does not take {key}",
            name=name,
            key=keys[refused],
        )
    if refused is not None:
        return RecipeError(
            "model.unknown-option",
            "model.options: {name} does not take {argument!r}",
            name=name,
            argument=refused,
        )
    return RecipeError(
        "model.not-built",
        "model.name: {name} cannot be built{given}: {reason}",
        name=name,
        given=f" with model.options = {options}" if options else "",
        reason=_first_line(error),
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
