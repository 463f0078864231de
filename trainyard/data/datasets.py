"""From the [data] and [augment] sections of a recipe to feeds of batches."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch

from trainyard.course import Course, Phase, build_course
from trainyard.data.augment import AugmentConfig, CentralCrop, RandomResizedCrop
from trainyard.data.feed import NONE, Augmentation, Feed, HostBatches, TrainingFeed
from trainyard.data.index import Index, check_same_classes, load_index, match_classes
from trainyard.data.indexing import Progress
from trainyard.data.loader import DataConfig, Loader, LoaderSpec, Locations
from trainyard.data.merge import open_merged
from trainyard.data.order import Order, training_plan
from trainyard.data.plan import EndlessPlan, Excerpt, OnePassPlan
from trainyard.data.source import without_login
from trainyard.data.stream.join import JoinFeed, Place, num_passes
from trainyard.data.stream.loader import StreamLoader
from trainyard.data.stream.shards import PIPE, Stream, list_shards
from trainyard.data.stream.walk import StreamSpec
from trainyard.data.transforms import batch_transforms, pixel_transforms
from trainyard.errors import DataError, RecipeError
from trainyard.world import World, cores_per_rank, gather, in_turns, together


@dataclass(frozen=True)
class Datasets:
    train: Index | Stream
    val: Index

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"train": self.train.fingerprint, "val": self.val.fingerprint}


def open_datasets(config: DataConfig, world: World, progress: Progress) -> Datasets:
    """The indices of the recipe's data, whose classes are the same.

    Training data that comes as a stream has no index, and the classes of the validation data.
    """
    if config.order == "join":
        shards = _same_shards(config, world)
        val = open_split(config.val, "data.val", world, progress)
        assert config.samples is not None
        return Datasets(Stream(shards, config.samples, val.classes), val)
    train = open_split(config.train, "data.train", world, progress)
    return Datasets(train, open_validation(config, train.classes, world, progress))


def _same_shards(config: DataConfig, world: World) -> tuple[str, ...]:
    """The shards of a stream. Each rank lists them, to take each size-th: the lists must agree."""
    with together(world):
        shards = list_shards(config)
    digest = sha256("\n".join(shards).encode()).digest()
    first = gather(world, digest)[0]
    with together(world):
        if digest != first:
            raise DataError(
                f"{without_login(description(config.train))}: {socket.gethostname()} holds other "
                "shards there than the first rank's node"
            )
    return shards


def open_validation(
    config: DataConfig, classes: Sequence[str], world: World, progress: Progress
) -> Index:
    """The index of the validation data, of the same classes as the training data.

    Where that was merged, the parts with validation data may lack classes of the others.
    """
    known = None if isinstance(config.train, str | None) else classes
    val = open_split(config.val, "data.val", world, progress, known=known)
    with together(world):
        check_same_classes(classes, val.classes, description(config.val), has_names=val.has_names)
    return val


def open_labelled(
    locations: Locations, classes: Sequence[str], world: World, progress: Progress
) -> tuple[Index, list[int]]:
    """Other data to evaluate a model of `classes` on, and their number of each of its classes.

    The labels in the index are numbers of its own classes.
    """
    index = open_split(locations, "data.val", world, progress)
    with together(world):
        return index, match_classes(
            classes, index.classes, description(locations), has_names=index.has_names
        )


def description(locations: Locations | None) -> str:
    return " and ".join(_listed(locations or ()))


def _listed(locations: Locations) -> tuple[str, ...]:
    return (locations,) if isinstance(locations, str) else locations


def open_split(
    locations: Locations | None,
    key: str,
    world: World,
    progress: Progress,
    *,
    known: Sequence[str] | None = None,
) -> Index:
    """The index of a location on every rank; the first rank makes it, or checks the saved one.

    Several locations are merged; for `known` see `open_merged`.

    The others take the first one's word for it: a thousand ranks that look whether a thousand
    folders have changed are a load on a file server. Only where they cannot see its file, in a
    cache on another node, do they make their own.
    """
    if locations is None:
        raise RecipeError(f"{key} is not set: pass --data LOCATION, or --{key} LOCATION")
    if any(location.startswith(PIPE) for location in _listed(locations)):
        raise RecipeError(
            f"{key} = {description(locations)!r}: only training data with data.order = 'join' can "
            "come out of a pipe"
        )
    with together(world):
        first = open_merged(_listed(locations), known, progress) if world.is_first else None
    found = gather(world, None if first is None else (first.path, first.fingerprint))[0]
    assert found is not None
    path, fingerprint = found

    def same_index() -> Index:
        progress(0)  # it was another's turn for long, perhaps
        index = first or load_index(path)
        if index is None or index.fingerprint != fingerprint:
            index = open_merged(_listed(locations), known, progress)
        if index.fingerprint != fingerprint:
            raise DataError(
                f"{description(locations)}: {socket.gethostname()} holds other data there than "
                "the first rank's node (other files, sizes or classes)"
            )
        return index

    return in_turns(world, same_index)


@dataclass(frozen=True, kw_only=True)
class Feeds:
    """Makes feeds of one rank's batches on its device."""

    data: DataConfig
    augment: AugmentConfig
    global_batch: int
    seed: int
    channels_last: bool
    world: World
    device: torch.device

    def training(
        self,
        data: Index | Stream,
        order: Order,
        course: Course,
        *,
        place: Place,
        report: Callable[[dict[str, Any]], None],
    ) -> TrainingFeed | JoinFeed:
        """Augmented samples; of a stream, see JoinFeed for `place` and `report`."""
        if isinstance(data, Stream):
            return self.join(data, course, place, report)
        assert not isinstance(order, Stream)
        return self.train(data, order, course)

    def train(self, index: Index, plan: EndlessPlan, course: Course) -> TrainingFeed:
        """Augmented, in the order of a plan, with the batches and image sizes of a course."""

        def open_phase(phase: Phase, step: int, skipped: int) -> Feed:
            first = course.samples(step) + skipped
            spec = LoaderSpec(
                plan=Excerpt(plan, first, phase.batch),
                crop=self._crop(),
                image_size=phase.image_size,
                start=0,
                stop=phase.stop - step,
                stage=self.data.stage,
                stage_gb=self.data.stage_gb,
                **self._common(),
            )
            return self._feed(Loader(index, spec), self._augmentation(first, phase.batch))

        return TrainingFeed(course, open_phase)

    def join(
        self,
        stream: Stream,
        course: Course,
        place: Place,
        report: Callable[[dict[str, Any]], None],
    ) -> JoinFeed:
        """Augmented, as the shards of a stream have them; see JoinFeed."""
        (phase,) = course.phases

        def open_loader(number: int, seen: int) -> StreamLoader:
            spec = StreamSpec(
                shards=stream.shards,
                num_classes=len(stream.classes),
                seed=self.seed,
                share=len(range(self.world.rank, phase.batch, self.world.size)),
                first_pass=number,
                seen=seen,
                num_passes=num_passes(course),
                crop=self._crop(),
                image_size=phase.image_size,
                **self._common(),
            )
            return StreamLoader(spec)

        return JoinFeed(
            course,
            open_loader=open_loader,
            open_feed=lambda batches, first: self._feed(
                batches, self._augmentation(first, phase.batch)
            ),
            place=place,
            world=self.world,
            report=report,
        )

    def statistics(self, index: Index | Stream, samples: int, image_size: int) -> TrainingFeed:
        """Training images to estimate batch norm statistics of: cropped and flipped, no more.

        Of `samples`, rounded up to whole batches, the first of the run's order.
        """
        assert isinstance(index, Index)  # config.py refuses run.bn_samples of a stream
        batch = min(self.global_batch, max(samples, self.world.size))
        kept = {key: getattr(self.augment, key) for key in ("scale", "ratio", "flip")}
        plain = replace(self, augment=AugmentConfig(**kept), global_batch=batch)
        plan = training_plan(self.data, index, global_batch=batch, seed=self.seed)
        course = build_course(
            f"{samples} samples",
            epoch_samples=plan.epoch_samples,
            batch=batch,
            image_size=image_size,
        )
        feed = plain.train(index, plan, course)
        feed.seek(0, 0)
        return feed

    def evaluation(self, index: Index) -> Feed:
        """Every image once, its central crop."""
        plan = OnePassPlan(len(index), self.global_batch)
        size = self.data.eval_size or self.data.image_size
        spec = LoaderSpec(
            plan=plan,
            crop=CentralCrop(size, self.data.crop_pct),
            image_size=size,
            start=0,
            stop=plan.num_steps,
            stage=self.data.stage,
            stage_gb=self.data.stage_gb,
            **self._common(),
        )
        return self._feed(Loader(index, spec))

    def _crop(self) -> RandomResizedCrop:
        augment = self.augment
        return RandomResizedCrop(self.seed, augment.scale, augment.ratio, augment.flip)

    def _augmentation(self, first: int, batch: int) -> Augmentation:
        pixels = pixel_transforms(
            self.augment,
            seed=self.seed,
            mean=self.data.mean,
            interpolation=self.data.interpolation,
        )
        batches = batch_transforms(self.augment, seed=self.seed)
        return Augmentation(pixels, batches, position=first, global_batch=batch)

    def _common(self) -> dict[str, Any]:
        return {
            "interpolation": self.data.interpolation,
            "rank": self.world.rank,
            "size": self.world.size,
            "threads": self.data.threads or cores_per_rank(self.world),
        }

    def _feed(self, batches: HostBatches, augmentation: Augmentation = NONE) -> Feed:
        return Feed(
            batches,
            self.device,
            mean=self.data.mean,
            std=self.data.std,
            channels_last=self.channels_last,
            augmentation=augmentation,
        )
