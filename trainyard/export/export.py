"""Exports are written in a hidden folder, reloaded, compared, and only then moved in place."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from torch import nn

from trainyard.classifier import Classifier
from trainyard.errors import DiskError, InputError, TrainyardError
from trainyard.export import IMAGES, OPSET, TOLERANCE
from trainyard.export.card import MADE_BY, card
from trainyard.export.check import (
    NO_SAMPLES,
    Bench,
    DiffersError,
    Measured,
    plain_model,
    samples_of,
)
from trainyard.export.description import Description, describe
from trainyard.export.formats import FORMATS, Onnx, formats
from trainyard.export.hub import CARD, CONFIG, HUB, WEIGHTS, is_ours
from trainyard.export.int8 import Int8
from trainyard.export.push import Repository
from trainyard.files import disk_error, fsync, part_of, writing
from trainyard.monitor.history import METRICS
from trainyard.printable import printable


class LessAccurateError(TrainyardError):
    """An export whose accuracy is below the model's by more than is allowed."""


@dataclass(frozen=True)
class Export:
    """The result of an export."""

    path: Path
    """The file, or the folder for timm."""
    kind: str
    """Its format, or "hub"."""
    bytes: int
    measured: Measured
    metric: str
    """Of the accuracy that was measured: "top1" or "map"."""
    files: list[Path]
    """All files, the card included."""


_CALIBRATION = 256  # training images
_NAMED = 3  # layers in an error


class Exporter:
    """Exports one classifier, to any number of files."""

    def __init__(
        self,
        classifier: Classifier,
        license: str | None = None,
        *,
        runtime: Mapping[str, bytes] | None = None,
        title: str | None = None,
        images: int = IMAGES,
        tolerance: float = TOLERANCE,
        int8: bool = False,
        opset: int | None = None,
    ) -> None:
        """`license`: an identifier for the cards, such as apache-2.0. `runtime`: for a page, the
        files of onnxruntime-web, and `title`; see page.py. `int8`: ONNX models of 8 bits.

        `images`, `tolerance`: validation images to measure on, and points of accuracy. InputError
        if `int8` lacks images to calibrate or to measure on.
        """
        self._classifier, self._tolerance = classifier, tolerance
        self._model: nn.Module = plain_model(classifier)
        try:
            samples = samples_of(classifier, "val", images)
        except (InputError, OSError):
            if int8:  # it is proved by them alone
                raise
            samples = NO_SAMPLES
        self._bench = Bench(classifier, self._model, samples)
        self._int8 = self._quantiser() if int8 else None
        how = Onnx(opset or OPSET, self._int8, runtime or {}, title)
        self._formats = formats(how) | {"hub": HUB}
        self._about: Description = describe(classifier, license)
        self._metric = "map" if classifier.has_lists else "top1"
        self._bytes = sum(weight.nbytes for weight in self._model.state_dict().values())

    def _quantiser(self) -> Int8:
        samples = samples_of(self._classifier, "train", _CALIBRATION)
        return Int8(Bench(self._classifier, self._model, samples), self._tolerance / 100)

    def check_timm(self, option: str) -> None:
        """InputError about an option if timm does not know the architecture."""
        if self._about.own_module is not None:
            name = self._about.architecture
            raise InputError(
                "export.unknown-to-timm",
                "{option}: timm has no architecture {name}: export a FILE",
                option=option,
                name=name,
            )

    def to_file(self, path: Path, kind: str) -> Export:
        """Write a file of a format, and a card beside it: model.onnx and model.onnx.md.

        Both replace existing ones, but no file that is not a card. InputError if they cannot be
        written, TrainyardError if the model cannot be exported to this format.
        """
        check_file(path, kind)
        if kind == "html" and self._about.channels not in (1, 3):
            raise InputError(
                "export.page-of-channels",
                "{path}: a page shows photographs, of 1 or 3 channels, and the model takes "
                "{channels}: export an .onnx or a .pt2 file",
                path=path,
                channels=self._about.channels,
            )
        with _staging(path, self._bytes) as folder:
            inner = folder / path.name
            measured = self._checked(kind, inner)
            size = sum(file.stat().st_size for file in folder.iterdir())
            card_path = card_of(path)
            text = printable(card(self._described(kind), kind, path.name, measured), keep="\n")
            (folder / card_path.name).write_text(text, encoding="utf-8")
            # The model comes last: once it is visible, all its parts are there.
            first, last = card_path.name, path.name
            parts = [f.name for f in folder.iterdir() if f.name not in (first, last)]
            names = [first, *parts, last]
            _move(folder, path.parent, names)
        return Export(
            path, kind, size, measured, self._metric, [path.parent / name for name in names]
        )

    def to_hub(self, path: Path, name: str | None = None) -> Export:
        """Write a folder that timm loads, new or in place of an earlier export.

        `name`: by which timm loads it, in the card's code; else that of this folder.
        """
        check_hub(path)
        self.check_timm(f"--hub {path}")
        name = name or f"local-dir:{path.absolute().name}"
        with _staging(path, self._bytes) as folder:
            measured = self._checked("hub", folder)
            size = sum(file.stat().st_size for file in folder.iterdir())
            text = printable(card(self._about, "hub", name, measured), keep="\n")
            (folder / CARD).write_text(text, encoding="utf-8")
            path.mkdir(exist_ok=True)
            names = [CARD, CONFIG, WEIGHTS]
            _move(folder, path, names)
        return Export(path, "hub", size, measured, self._metric, [path / name for name in names])

    def push(
        self, to: Repository, beside: Sequence[Export] = (), *, private: bool
    ) -> tuple[Export, str]:
        """Upload a folder for timm, and exported files beside it.

        Returns the main part, and the URL of the commit. A model that timm does not know is
        uploaded as those files alone, with the first one's card. Errors are those of `to_hub` and
        of `Repository.push`.
        """
        if not beside:
            self.check_timm(f"--push {to.name}")
        message = f"{self._about.architecture}, step {self._about.step:,}"
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "export"
            if self._about.own_module is None:
                main = self.to_hub(folder, to.timm_name)
            else:
                main = beside[0]
                folder.mkdir()
                (folder / CARD).symlink_to(card_of(main.path).absolute())
            for file in (file for one in beside for file in one.files):
                if not (folder / file.name).exists():  # FILE may be called model.safetensors
                    (folder / file.name).symlink_to(file.absolute())
            return main, to.push(folder, message, private=private)

    def _described(self, kind: str) -> Description:
        """What a file says of itself; the run's evaluation is not one of 8 bits."""
        return replace(self._about, evaluation={}) if self._formats[kind].is_int8 else self._about

    def _checked(self, kind: str, path: Path) -> Measured:
        """Write, reload and measure."""
        form = self._formats[kind]
        try:
            form.write(self._model, self._described(kind), path)
            exported, photographs = form.load(path), form.takes_photographs
            measured = self._bench.measure(exported, photographs, is_exact=not form.is_int8)
            int8 = self._int8 if form.is_int8 else None
            if 100 * measured.fall > self._tolerance:
                self._refuse(kind, measured, int8)
            return replace(
                measured,
                ms=self._bench.milliseconds(exported, photographs),
                float_ms=int8.float_ms(self._bench) if int8 else (),
                float_layers=int8.float_layers if int8 else None,
            )
        except (OSError, LessAccurateError):
            raise
        except DiffersError as error:
            reason = str(error)
        except Exception as error:  # exporters and their operators raise many kinds of errors
            if disk_error(error, path) is not None:
                raise
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        name = self._about.architecture
        if kind in ("hub", "safetensors") and self._about.own_module is None:
            raise TrainyardError(
                "export.not-loadable",
                "{name} as {format}: timm cannot load it again: {reason}; nothing was written",
                name=name,
                format=kind,
                reason=reason,
            )
        raise TrainyardError(
            "export.failed",
            "{name} as {format}: export failed: {reason}; nothing was written",
            name=name,
            format=kind,
            reason=reason,
        )

    def _refuse(self, kind: str, measured: Measured, int8: Int8 | None) -> NoReturn:
        losses = int8.losses(self._bench)[:_NAMED] if int8 else []
        named = ", ".join(f"{name} ({100 * change:.1f})" for name, change in losses)
        raise LessAccurateError(
            "export.less-accurate",
            "{name} as {format}: {metric} falls from {own:.2%} to {found:.2%} on {images} "
            "validation images, by more than --tolerance {tolerance:g}{layers}; nothing was "
            "written",
            name=self._about.architecture,
            format=f"{kind} of 8 bits" if int8 else kind,
            metric=METRICS[self._metric],
            own=measured.model_accuracy,
            found=measured.accuracy,
            images=measured.images,
            tolerance=self._tolerance,
            layers=named
            and f"; the layers that alone move the most probability, in points: {named}",
        )


def check_one_model(classifier: Classifier) -> None:
    """InputError for several runs that are no mean of weights."""
    if classifier.is_vote:
        raise InputError(
            "export.of-votes",
            "--with: an export holds one model, and this is {note}: evaluate and predict take it",
            note=classifier.note,
        )


def card_of(path: Path) -> Path:
    """The path of an exported file's card."""
    return path.with_name(f"{path.name}.md")


def check_file(path: Path, kind: str) -> None:
    """InputError if a file cannot be exported to this path."""
    FORMATS[kind].check()
    if not path.parent.is_dir():
        raise InputError("export.no-parent-folder", path=path, folder=path.parent)
    if path.is_dir():
        raise InputError(
            "export.file-is-folder",
            "{path}: is a folder; name a file, or say --hub {path}",
            path=path,
        )
    beside = card_of(path)
    if beside.exists() and MADE_BY not in beside.read_text(errors="replace"):
        raise InputError(
            "export.card-exists",
            "{path}: exists, where the model card would be written: move it, or export elsewhere",
            path=beside,
        )


def check_hub(path: Path) -> None:
    """InputError if a folder for timm cannot be made at this path."""
    if not path.parent.is_dir():
        raise InputError("export.no-parent-folder", path=path, folder=path.parent)
    if path.exists() and not path.is_dir():
        raise InputError("export.hub-is-file", "--hub {path}: is a file; name a folder", path=path)
    if path.is_dir() and any(path.iterdir()) and not is_ours(path):
        raise InputError(
            "export.hub-not-empty",
            "--hub {path}: holds other files; name a new folder, or an empty one",
            path=path,
        )


@contextmanager
def _staging(path: Path, needed: int) -> Iterator[Path]:
    """A temporary hidden folder on the same disk. InputError if it cannot be written.

    DiskError if the disk is full or read-only; `needed`: bytes to be written.
    """
    folder = part_of(path.absolute())
    try:
        with writing(path, needed, folder):
            folder.mkdir()
            yield folder
    except DiskError:
        raise
    except OSError as error:
        raise InputError(
            "file.unwritable", path=path, reason=error.strerror or str(error)
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(source: Path, target: Path, names: list[str]) -> None:
    """Sync and move files in this order."""
    for name in names:
        with open(source / name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(source / name, target / name)
    fsync(target)
