"""The linear probe of a run: its classifier starts as a logistic regression on its features."""

import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from trainyard.config import RunConfig
from trainyard.data.batch import Batch
from trainyard.data.feeds import Feeds
from trainyard.data.index.table import Index
from trainyard.data.sampler.plan import Ids
from trainyard.distributed import Heartbeat
from trainyard.errors import DataError, RecipeError
from trainyard.model.adapt import classifier_layers
from trainyard.monitor.progress import counter
from trainyard.run.loss import class_weights
from trainyard.run.predict import on_device
from trainyard.training.evaluate import in_eval_mode
from trainyard.training.logistic import Logistic, fit_logistic
from trainyard.training.precision import AUTOCASTS, autocast
from trainyard.world import together, total

_MOST = 10_000  # images
_BATCH = 64  # of one rank: its features have the same bits on any number of ranks


def put_probe(
    config: RunConfig,
    model: nn.Module,
    index: Index,
    feeds: Feeds,
    *,
    console: Console,
    heartbeat: Heartbeat,
) -> str:
    """Make the classifier of a model the best one for its features. Returns a sentence about it.

    Each training image is seen once, as in an evaluation; of more than _MOST, so many. All ranks
    call: each computes the features of a share, the first one fits the classifier, and all have the
    same. RecipeError for a model without a linear classifier, DataError if no image can be read.
    """
    started, ids, world = time.monotonic(), evenly_spaced(index, _MOST), feeds.world
    with together(world), counter(console, "linear probe", len(ids)) as show:
        layer = _linear_classifier(config, model)
        marked = heartbeat.counted(
            "linear probe", lambda seen: show(min(world.size * seen, len(ids)))
        )
        with feeds.once(index, ids, _BATCH) as batches:
            placed = on_device(feeds.device, model)
            rows = _rows(config, placed, batches, ids, on_count=marked)
    rows = total(world, rows)  # each rank's are 0 where other ranks' are not
    fitted_CD, sentence = rows.new_zeros(len(index.classes), rows.shape[1]).double(), ""
    with together(world):
        if world.is_first:
            mark = partial(heartbeat.mark, "linear probe")
            fitted = _fitted(config, index, ids, rows, on_value=mark)
            fitted_CD = torch.cat([fitted.bias_C[:, None], fitted.weight_CD], dim=1)
            sentence = _sentence(
                fitted, int(rows[:, 0].sum()), len(index), time.monotonic() - started
            )
    fitted_CD = total(world, fitted_CD)
    with torch.no_grad():
        layer.bias.copy_(fitted_CD[:, 0])
        layer.weight.copy_(fitted_CD[:, 1:])
    return sentence


def evenly_spaced(index: Index, count_limit: int) -> Ids:
    """At most so many samples, ascending: every n-th one, in the order of their classes."""
    count, order = min(count_limit, len(index)), np.arange(len(index))
    if index.lists is None:
        order = np.argsort(index.label, kind="stable")
    chosen: Ids = np.sort(order[np.arange(count) * len(index) // count])
    return chosen


def _linear_classifier(config: RunConfig, model: nn.Module) -> nn.Linear:
    layers = classifier_layers(model)
    if len(layers) == 1 and isinstance(layers[0], nn.Linear) and layers[0].bias is not None:
        return layers[0]
    raise RecipeError("model.no-linear-classifier", name=config.model.name)


@torch.no_grad()
def _rows(
    config: RunConfig,
    model: nn.Module,
    batches: Iterable[Batch],
    ids: Ids,
    *,
    on_count: Callable[[int], None],
) -> Tensor:
    """float32[samples, 1 + D]: 1 and the features of each sample that this rank has read, else 0.

    RecipeError unless the scores of the model are those of its classifier.
    """
    layer, inputs = _linear_classifier(config, model), list[Tensor]()
    rows = torch.zeros(len(ids), 1 + layer.in_features, device=layer.weight.device)
    hook = layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    done = 0
    with hook, in_eval_mode([model]):
        for batch in batches:
            if not len(batch.ids):  # of the last step, where ranks before this one had the rest
                continue
            with autocast(rows.device, AUTOCASTS[config.batch.precision]):
                scores_BC = model(batch.images_BCHW)
                features_BD = inputs.pop()
                own_BC = nn.functional.linear(features_BD, layer.weight, layer.bias)
            is_same = own_BC.shape == scores_BC.shape
            if not is_same or not torch.allclose(own_BC, scores_BC, 1e-2, 1e-3, equal_nan=True):
                raise RecipeError("model.no-linear-classifier", name=config.model.name)
            is_good = (batch.weights > 0) & features_BD.isfinite().all(dim=1)
            one_and_features = torch.cat([torch.ones_like(is_good[:, None]), features_BD], dim=1)
            positions = torch.from_numpy(np.searchsorted(ids, batch.ids.numpy())).to(rows.device)
            rows[positions] = torch.where(is_good[:, None], one_and_features.float(), 0.0)
            done += len(batch.ids)
            on_count(done)
    return rows


def _fitted(
    config: RunConfig, index: Index, ids: Ids, rows: Tensor, *, on_value: Callable[[], None]
) -> Logistic:
    """Fitted by the loss of the recipe, its class weights, and how often classes are drawn."""
    num_classes, labels = len(index.classes), index.label[ids]
    weights = np.ones(len(ids))
    if index.lists is not None:
        targets = torch.from_numpy(index.lists.multi_hot(labels, num_classes))
    else:
        targets = torch.from_numpy(labels.astype(np.int64))
        of_class = np.array(class_weights(config.loss, index) or np.ones(num_classes))
        of_class *= np.maximum(index.samples_per_class(), 1.0) ** -config.data.balance
        weights = of_class[labels]
    weights_N = torch.from_numpy(weights).to(rows.device)
    is_good = rows[:, 0].bool() & (weights_N > 0)
    if not is_good.any():
        raise DataError("data.none-readable", location="training data", num_images=len(ids))
    if config.loss.name == "bce" and targets.ndim == 1:
        targets = nn.functional.one_hot(targets, num_classes)
    samples = rows[is_good, 1:], targets.to(rows.device)[is_good], weights_N[is_good]
    return fit_logistic(*samples, num_classes, on_value=on_value)


def _sentence(fitted: Logistic, count: int, of: int, seconds: float) -> str:
    images = f"{count:,} images" if count == of else f"{count:,} of {of:,} images, evenly spaced"
    by = f", of {fitted.num_held_out:,} held out" if fitted.num_held_out else ""
    return (
        f"linear probe: the classifier begins as a logistic regression on the features of {images} "
        f"(penalty {fitted.strength:g}{by}; {seconds:.1f} s)"
    )
