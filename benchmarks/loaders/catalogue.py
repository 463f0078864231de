"""Which whole loaders are measured, on which data."""

from typing import NamedTuple

from benchmarks.loaders.environments import MAIN

FULL, SMALL = "full size", "short side 256, q90"
ALONE = {FULL: f"{FULL}, decoder alone", SMALL: f"{SMALL}, decoder alone"}
"""The groups of what whole loaders are beside."""
_FOLDER = "photographs"


class Contender(NamedTuple):
    name: str
    module: str  # of benchmarks.loaders.peers
    function: str
    environment: str
    variant: str
    group: str
    is_ours: bool = False
    is_minor: bool = False  # left out by --quick, and on two cores

    @property
    def has_two_cores(self) -> bool:
        return not self.is_minor and self.group not in ALONE.values()

    @property
    def title(self) -> str:
        return f"{self.name} ({self.group})"


def _ours(name: str, variant: str, group: str = FULL, *, is_minor: bool = False) -> Contender:
    return Contender(
        f"Trainyard, {name}", "trainyard_loader", "make", MAIN, variant, group, True, is_minor
    )


def _alone(name: str, variant: str, group: str) -> Contender:
    return Contender(
        f"Trainyard, {name}", "trainyard_decoder", "make", MAIN, variant, ALONE[group], True
    )


def _peer(
    name: str,
    function: str,
    environment: str,
    variant: str,
    group: str = FULL,
    *,
    is_minor: bool = False,
) -> Contender:
    module, _, function = function.partition(".")
    return Contender(name, module, function, environment, variant, group, False, is_minor)


CONTENDERS = (
    _ours("packed", "packed"),
    _ours("WebDataset, seek table", "webdataset-seek"),
    _ours("WebDataset", "webdataset"),
    _ours("folder, seek table", "folder-seek", is_minor=True),
    _ours("folder", "photographs", is_minor=True),
    _ours("HDF5, seek table", "hdf5-seek", is_minor=True),
    _ours("HDF5", "hdf5", is_minor=True),
    _peer("libjpeg-turbo's crop in C, threads", "in_threads.with_yardstick", MAIN, _FOLDER),
    _peer("nvImageCodec + torch, threads", "in_threads.with_nvimgcodec", "decoders", _FOLDER),
    _peer("simplejpeg + torch, threads", "in_threads.with_simplejpeg", MAIN, _FOLDER),
    _peer("FFCV, jpg", "ffcv_loader.make", "ffcv", "full.beton"),
    _peer("FFCV, raw", "ffcv_loader.make", "ffcv", "full-raw.beton"),
    _peer("DALI, files", "dali.files", "dali", _FOLDER),
    _peer("DALI, files, not antialiased", "dali.not_antialiased", "dali", _FOLDER, is_minor=True),
    _peer("DALI, WebDataset", "dali.webdataset", "dali", "webdataset", is_minor=True),
    _peer("torchvision, tensors", "torch_loader.tensors", MAIN, _FOLDER),
    _peer("torchvision, PIL", "torch_loader.pil", MAIN, _FOLDER),
    _peer("timm", "torch_loader.timm", MAIN, _FOLDER),
    _peer("webdataset", "webdataset_loader.make", MAIN, "webdataset"),
    _peer("grain, threads", "grain_loader.threads", "grain", _FOLDER),
    _peer("litdata", "litdata_loader.make", "litdata", "litdata"),
    _peer("streaming (MDS)", "streaming_loader.make", "streaming", "mds"),
    _peer("SPDL, FFmpeg", "spdl_loader.ffmpeg", "spdl", _FOLDER),
    _peer("SPDL, simplejpeg", "spdl_loader.with_simplejpeg", "spdl", _FOLDER, is_minor=True),
    _ours("packed, raw pixels", "small-pixels", SMALL),
    _ours("packed", "small-packed", SMALL),
    _ours("WebDataset, seek table", "small-webdataset-seek", SMALL),
    _ours("WebDataset", "small-webdataset", SMALL),
    _peer("FFCV, raw", "ffcv_loader.make", "ffcv", "small-raw.beton", SMALL),
    _peer("FFCV, jpg", "ffcv_loader.make", "ffcv", "small.beton", SMALL),
    _alone("packed", "packed", FULL),
    _alone("WebDataset, seek table", "webdataset-seek", FULL),
    _alone("WebDataset", "webdataset", FULL),
    _alone("packed, raw pixels", "small-pixels", SMALL),
    _alone("packed", "small-packed", SMALL),
    _alone("WebDataset, seek table", "small-webdataset-seek", SMALL),
    _alone("WebDataset", "small-webdataset", SMALL),
)
