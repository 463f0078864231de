"""The classifier in an exported file, run by the file's own library."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.classifier import Classifier, Guess, Picture, content_of, listed
from trainyard.config import RunConfig, override
from trainyard.data.batch import BadSample, Batch
from trainyard.data.decode.decode import BadImageError
from trainyard.data.feeds import Feeds
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.errors import CheckpointError, DataError, TrainyardError
from trainyard.export.check import Exported, pixels_of
from trainyard.export.formats import FORMATS
from trainyard.own_code import is_own

_OF_DATA = (
    "image_size",
    "fit",
    "crop_pct",
    "interpolation",
    "mean",
    "std",
    "exif",
    "range",
    "bands",
    "background",
)


def load_export(path: str | Path) -> Classifier:
    """The classifier in a file that `trainyard export` wrote, on the CPU.

    CheckpointError if it is no such file, or a .safetensors of a function of the user's, whose run
    is needed; InputError if its library is not installed.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    FORMATS[kind].check()
    try:
        about = {key: _plain(value) for key, value in FORMATS[kind].about(path).items()}
        if kind == "safetensors" and is_own(about["architecture"]):  # a file cannot choose code
            raise CheckpointError(
                "export.of-own-code",
                "{path}: its network is {function}, which only its run may call: name the run",
                path=path,
                function=about["architecture"],
            )
        takes_photographs = about["input"].startswith("uint8")
        if takes_photographs and kind != "html":
            kind += "-photograph"
        keys = {f"data.{key}": about[key] for key in _OF_DATA if key in about}
        keys |= {"data.channels": len(about["mean"]), "model.name": about["architecture"]}
        config = override(RunConfig(), keys)
        model = _File(FORMATS[kind].load(path), takes_photographs)
        classes = tuple(about["classes"])
    except (TrainyardError, MemoryError):
        raise
    except Exception as error:  # of each library its own kinds
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointError(
            "export.unreadable",
            "{path}: is no file of trainyard export, or a damaged one: {reason}",
            path=path,
            reason=reason,
        ) from None
    return (_OfPhotographs if takes_photographs else Classifier)(
        model=model.eval(),
        classes=classes,
        recipe=config,
        config=config,
        checkpoint=path,
        has_lists=about.get("probabilities") == "sigmoid",
        step=about["step"],
        weights="" if about["weights"] == "raw" else about["weights"],
        device=torch.device("cpu"),
    )


def _plain(value: str) -> Any:
    """A value of the metadata: JSON, or text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


class _File(nn.Module):
    """An exported model as a module; photographs are batches of one, uint8[1, C, height, width]."""

    def __init__(self, exported: Exported, takes_photographs: bool) -> None:
        super().__init__()
        self._run: Exported = lambda images: exported(images)  # a module in it is no part of this
        self._takes_photographs = takes_photographs
        self.place = nn.Parameter(torch.zeros(0), requires_grad=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self._takes_photographs:
            (photograph_CHW,) = images_BCHW
            return self._run(photograph_CHW.permute(1, 2, 0).contiguous())
        return self._run(images_BCHW.contiguous())


class _OfPhotographs(Classifier):
    """A classifier whose file takes photographs, one by one."""

    def predict(
        self, images: Picture | Iterable[Picture], top: int = 5, **views: Any
    ) -> list[list[Guess]]:
        return [super(_OfPhotographs, self).predict([i], top, **views)[0] for i in listed(images)]

    def preprocess(self, images: Picture | Iterable[Picture]) -> Tensor:
        """uint8[1, channels, height, width] of one image."""
        (image,) = listed(images)
        data = self.config.data
        try:
            return pixels_of(content_of(image, 0, data), data.channels, data.rendering).permute(
                2, 0, 1
            )[None]
        except BadImageError as error:
            raise DataError("image.unreadable", name="image 1", reason=str(error)) from None

    def feeds(self) -> Feeds:
        return _Photographs(**vars(super().feeds()))


@dataclass(frozen=True, kw_only=True)
class _Photographs(Feeds):
    """Feeds of whole images, one by one."""

    @contextmanager
    def evaluation(self, index: Index) -> Iterator[Iterator[Batch]]:  # type: ignore[override]
        reader = Reader(index)
        yield (self._batch(reader, index, sample) for sample in range(len(index)))

    def _batch(self, reader: Reader, index: Index, sample: int) -> Batch:
        data, bad = self.data, list[BadSample]()
        try:
            pixels_HWC = pixels_of(reader.read(sample), data.channels, data.rendering)
        except (BadImageError, DataError, OSError) as error:
            file, offset, _ = index.locate(sample)
            bad.append(BadSample(sample, file, offset, str(error)))
            pixels_HWC = torch.zeros(1, 1, data.channels, dtype=torch.uint8)
        label = torch.tensor([0 if index.lists else int(index.label[sample])])
        return Batch(
            ids=torch.tensor([sample]),
            epochs=torch.zeros(1, dtype=torch.int64),
            labels=label,
            weights=torch.tensor([0.0 if bad else 1.0]),
            images_BCHW=pixels_HWC.permute(2, 0, 1)[None],
            mixed_labels=label,
            lam=torch.ones(1),
            bad=bad,
        )
