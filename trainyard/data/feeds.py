"""Builds feeds of batches from the [data] and [augment] sections of a recipe."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from trainyard.course import Course, Phase, build_course
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.extra import MultiHot
from trainyard.data.augment.transforms import batch_transforms, pixel_transforms
from trainyard.data.config import DataConfig
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.device.copies import Transfer, page_locked, transfer_to
from trainyard.data.device.feed import (
    EvaluationFeeds,
    Feed,
    HostBatches,
    Normalise,
    Pixels,
    TrainingFeed,
)
from trainyard.data.device.gpu_decode import DecodingTransfer
from trainyard.data.device.join import JoinFeed, JoinState, StreamLoader, num_passes
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import Crop, LoaderSpec
from trainyard.data.order import Order, training_plan
from trainyard.data.sampler.plan import (
    EndlessPlan,
    Ids,
    OnePassPlan,
    Plan,
    PlanSlice,
    VirtualRanksPlan,
    WholeBatchesPlan,
)
from trainyard.data.stream.shards import Stream
from trainyard.data.stream.walk import StreamSpec
from trainyard.image_size import ImageSize
from trainyard.world import World, cores_per_rank


@dataclass(frozen=True, kw_only=True)
class Feeds:
    """Makes the feeds of one rank's batches on its device."""

    data: DataConfig
    augment: AugmentConfig
    global_batch: int
    seed: int
    channels_last: bool
    world: World
    device: torch.device
    virtual_ranks: int | None = None
    """As in the recipe: a batch has the samples of each virtual rank of this rank, in turn."""
    dtype: torch.dtype = torch.float32
    """Dtype of images that are not mixed or erased: the one autocast rounds them to in a model's
    first convolution. A model that resizes its own input (CrossViT) does so in this precision.
    uint8: pixels as they are."""

    def training(
        self,
        data: Index | Stream,
        order: Order,
        course: Course,
        *,
        resume_state: JoinState,
        report: Callable[[dict[str, Any]], None],
    ) -> TrainingFeed | JoinFeed:
        """Augmented samples; JoinFeed says what `resume_state` and `report` are, for a stream."""
        if isinstance(data, Stream):
            return self.join(data, course, resume_state, report)
        assert not isinstance(order, Stream)
        return self.train(data, order, course)

    def train(self, index: Index, plan: EndlessPlan, course: Course) -> TrainingFeed:
        """Augmented samples in the order of a plan, with the batch and image sizes of a course."""

        multi_hot = None
        if index.lists is not None and self.augment.extra is not None:
            multi_hot = MultiHot(index.lists, len(index.classes), self.device)

        def open_phase(phase: Phase, step: int, skipped: int) -> Feed:
            first = course.samples(step) + skipped
            part, size = PlanSlice(plan, first, phase.batch), phase.image_size
            spec = self._spec(part, self._crop(), size, phase.stop - step)
            augmented = self._augmented(first, phase.batch, multi_hot)
            return self._feed_of(index, self._loader(index, spec), spec, **augmented)

        return TrainingFeed(course, open_phase)

    def _spec(self, plan: Plan, crop: Crop, size: ImageSize, stop: int) -> LoaderSpec:
        data = self.data
        return LoaderSpec(
            plan=VirtualRanksPlan(plan, self.virtual_ranks) if self.virtual_ranks else plan,
            crop=crop,
            image_size=size,
            stop=stop,
            decode=data.decode,
            stage=data.stage,
            stage_gb=data.stage_gb,
            **self._common(),
        )

    def join(
        self,
        stream: Stream,
        course: Course,
        resume_state: JoinState,
        report: Callable[[dict[str, Any]], None],
    ) -> JoinFeed:
        """Augmented samples in the order of a stream's shards; see JoinFeed."""
        (phase,) = course.phases

        def open_loader(number: int, seen: int) -> StreamLoader:
            spec = StreamSpec(
                shards=stream.shards,
                numbers=stream.numbers,
                seed=self.seed,
                share=len(range(self.world.rank, phase.batch, self.world.size)),
                first_pass=number,
                seen=seen,
                num_passes=num_passes(course),
                crop=self._crop(),
                image_size=phase.image_size,
                **self._common(),
            )
            return page_locked(StreamLoader(spec), self.device)

        return JoinFeed(
            course,
            open_loader=open_loader,
            open_feed=lambda batches, first: self._feed(
                batches, transfer_to(self.device), **self._augmented(first, phase.batch)
            ),
            channels=self.data.channels,
            resume_state=resume_state,
            world=self.world,
            report=report,
        )

    def statistics(
        self, index: Index | Stream, samples: int, image_size: ImageSize
    ) -> TrainingFeed:
        """Training images to estimate batch-norm statistics from: cropped and flipped only.

        They are the first `samples` of the run's order, rounded up to whole batches.
        """
        assert isinstance(index, Index)  # config.py refuses run.bn_samples of a stream
        batch = min(self.global_batch, max(samples, self.world.size))
        kept = {key: getattr(self.augment, key) for key in ("scale", "ratio", "flip", "flip_mode")}
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
        """Every image once, its central crop or the whole: see `data.fit`."""
        spec = self._evaluated(index)
        return self._feed_of(index, self._loader(index, spec), spec)

    def once(self, index: Index, ids: Ids, batch: int) -> Feed:
        """Some images as in an evaluation; each rank has whole batches: see WholeBatchesPlan."""
        plan = WholeBatchesPlan(ids, batch, self.world.size)
        spec = replace(self._evaluated(index), plan=plan, stop=plan.num_steps)
        return self._feed_of(index, self._loader(index, spec), spec)

    def evaluations(self, index: Index, plan: OnePassPlan | None = None) -> EvaluationFeeds:
        """Feeds like `evaluation`, for the evaluations of a run, by one loader."""
        spec = self._evaluated(index)
        spec = spec if plan is None else replace(spec, plan=plan, stop=plan.num_steps)
        return EvaluationFeeds(
            partial(self._loader, index, spec),
            lambda loader: self._feed_of(index, loader, spec),
        )

    def _evaluated(self, index: Index) -> LoaderSpec:
        plan = OnePassPlan(len(index), self.global_batch)
        size = self.data.eval_size or self.data.image_size
        return self._spec(plan, self.data.evaluation_crop(size), size, plan.num_steps)

    def _crop(self) -> RandomResizedCrop:
        augment = self.augment
        return RandomResizedCrop(
            self.seed,
            augment.scale,
            augment.ratio,
            augment.flip,
            alternates=augment.flip_mode == "alternating",
            fit=self.data.fit,
            pad=self.data.padding,
        )

    def _augmented(
        self, first: int, batch: int, multi_hot: MultiHot | None = None
    ) -> dict[str, Any]:
        """The arguments of a training feed, whose first batch begins at a sample of the stream."""
        pixels = pixel_transforms(self.augment, seed=self.seed, mean=self.data.mean)
        world = self.world
        batches = [
            batch_transforms(self.augment, seed=self.seed, rank=rank, multi_hot=multi_hot)
            for rank in range(world.rank, self.virtual_ranks or world.rank + 1, world.size)
        ]
        transforms = {"pixel_transforms": pixels, "batch_transforms": batches}
        return {**transforms, "position": first, "global_batch": batch}

    def _common(self) -> dict[str, Any]:
        return {
            "interpolation": self.data.interpolation,
            "rendering": self.data.rendering,
            "channels": self.data.channels,
            "rank": self.world.rank,
            "size": self.world.size,
            "threads": self.data.threads or cores_per_rank(self.world),
        }

    def _loader(self, index: Index, spec: LoaderSpec) -> Loader:
        loader = Loader(index, spec)
        return page_locked(loader, self.device) if spec.decode == "cpu" else loader

    def _feed_of(
        self, index: Index, loader: HostBatches, spec: LoaderSpec, **augmented: Any
    ) -> Feed:
        if spec.decode == "cpu":
            return self._feed(loader, transfer_to(self.device), **augmented)
        size, how = spec.image_size, spec.interpolation
        transfer = DecodingTransfer(self.device, size, how=how, locate=index.locate)
        return self._feed(loader, transfer, **augmented)

    def _feed(self, batches: HostBatches, transfer: Transfer, **augmented: Any) -> Feed:
        if self.dtype == torch.uint8:
            pixels = Pixels(channels_last=self.channels_last)
            return Feed(batches, pixels, transfer, **augmented)
        normalise = Normalise(
            self.device,
            mean=self.data.mean,
            std=self.data.std,
            channels_last=self.channels_last,
            # Mixing, erasing and the user's own transform run in float32.
            dtype=torch.float32 if any(augmented.get("batch_transforms", ())) else self.dtype,
        )
        return Feed(batches, normalise, transfer, **augmented)
