"""What benchmarks/loader.py stands on: photographs, yardstick, contenders, tables."""

import argparse
import ctypes.util
import io
import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import tiles
from benchmarks.convergence import TUNING, next_jobs
from benchmarks.fashion_mnist import Job, Run, Team, prepare, recipe
from benchmarks.loaders.catalogue import CONTENDERS, FULL, SMALL
from benchmarks.loaders.decoders import quality, trainyard, without_extension, yardstick
from benchmarks.loaders.environments import MAIN, PEERS
from benchmarks.loaders.peers import functions
from benchmarks.loaders.photographs import make_photographs
from benchmarks.loaders.pool import BATCH, SIDE, Pool, load_pool
from benchmarks.loaders.tables import loader_tables
from benchmarks.loaders.variants import VARIANTS
from benchmarks.loaders.yardstick.build import build_yardstick
from benchmarks.published import Cell, by_source, typical
from benchmarks.simulated import simulated
from trainyard.data._native import core

ROOT = Path(__file__).parent.parent.parent
COUNT = BATCH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    make_photographs(folder / "data" / "photographs", COUNT, workers=1)
    return folder


@pytest.fixture(scope="module")
def pool(folder: Path) -> Pool:
    return load_pool(sorted((folder / "data" / "photographs").glob("*/*.jpg")))


@pytest.mark.slow
def test_photographs_are_like_imagenets_and_always_the_same(folder: Path, tmp_path: Path) -> None:
    about = make_photographs(folder / "data" / "photographs", COUNT, workers=1)
    assert 80_000 < np.mean([each.size for each in about]) < 140_000
    assert 400 < np.mean([each.width for each in about]) < 520
    assert 0.3 < np.mean([each.is_444 for each in about]) < 0.7
    assert min(each.quality for each in about) >= 88
    for each in make_photographs(tmp_path, 2, workers=1):
        path = folder / "data" / "photographs" / each.name
        assert (tmp_path / each.name).read_bytes() == path.read_bytes()
        image = Image.open(io.BytesIO(path.read_bytes()))
        assert image.size == (each.width, each.height)
        assert (image.layer[0][1:3] == (1, 1)) == each.is_444  # type: ignore[attr-defined]


def wanted(pool: Pool) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """By Pillow, whose code the reference is."""
    found = []
    for n in range(BATCH):
        image = Image.open(io.BytesIO(pool.encoded[n])).crop(pool.box(n))
        pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        found.append(pixels[:, ::-1] if pool.flips[n] else pixels)
    return np.stack(found)


def can_build() -> bool:
    has_avx2 = "avx2" in Path("/proc/cpuinfo").read_text()
    header = any(Path(place, "jpeglib.h").exists() for place in ("/usr/include",))
    return has_avx2 and header and ctypes.util.find_library("jpeg") is not None


@pytest.mark.slow
@pytest.mark.skipif(
    not can_build() or shutil.which("cc") is None, reason="needs AVX2, cc and libjpeg's headers"
)
def test_the_yardstick_gives_pillows_pixels(folder: Path, pool: Pool) -> None:
    build_yardstick(folder)
    decode = yardstick(folder)(pool, pool.batches()[0])
    found = quality([decode], [wanted(pool)])
    assert found["least_db"] > 50
    assert found["median_db"] > 55


@pytest.mark.slow
@pytest.mark.skipif(core is None, reason="needs the extension")
@pytest.mark.parametrize("kind", ["plain", "seek", "packed"])
def test_our_decoder_is_measured_on_the_same_crops(kind: str, pool: Pool) -> None:
    decode = trainyard(kind)(pool, pool.batches()[0])
    assert quality([decode], [wanted(pool)])["median_db"] > 45


@pytest.mark.slow
def test_what_others_are_held_against_is_pillows_own(pool: Pool) -> None:
    right = wanted(pool)
    for n in range(4):
        found = functions.pillow(pool.encoded[n], pool.box(n), bool(pool.flips[n]))
        assert np.array_equal(found, right[n])
    assert quality([without_extension(pool, pool.batches()[0])], [right])["least_db"] > 90


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")  # torchvision
@pytest.mark.parametrize(
    ("name", "least_db"),
    [("simplejpeg_torch", 50), ("torchvision_tensors", 50), ("pillow_draft", 25),
     ("simplejpeg_area", 25)],
)  # fmt: skip
def test_peers_decode_the_same_crop(name: str, least_db: float, pool: Pool) -> None:
    function = getattr(functions, name)
    right = wanted(pool)
    for n in range(8):
        pixels = function(pool.encoded[n], pool.box(n), bool(pool.flips[n]))
        error = np.square(pixels.astype(np.float64) - right[n]).mean()
        assert 10 * np.log10(255**2 / max(error, 1e-5)) > least_db


# --- the contenders ---


@pytest.mark.slow
def test_every_contender_has_its_code_its_environment_and_its_data() -> None:
    names = [contender.title for contender in CONTENDERS]
    assert len({*names}) == len(names)
    for contender in CONTENDERS:
        module = import_module(f"benchmarks.loaders.peers.{contender.module}")
        assert callable(getattr(module, contender.function))
        assert contender.environment in (MAIN, *PEERS)
        assert contender.variant in ("photographs", *VARIANTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "contender", ["trainyard_loader make", "trainyard_decoder make", "in_threads with_simplejpeg"]
)
def test_a_whole_loader_is_measured_in_a_process_of_its_own(contender: str, folder: Path) -> None:
    module, function = contender.split()
    words = [sys.executable, "-m", "benchmarks.loaders.measure"]
    words += [f"benchmarks.loaders.peers.{module}", function, "--seconds", "0.1"]
    words += ["--data", str(folder / "data" / "photographs")]
    result = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["shape"] == ["uint8", BATCH, SIDE, SIDE, 3]
    assert min(found["images_per_second"], found["first_batch_s"], found["import_s"]) > 0
    assert found["anonymous_mb"] > 20


# --- the tables ---


def loader(one: list[float], two: list[float]) -> dict[str, Any]:
    keys = ("first_batch_s", "import_s", "anonymous_mb", "torch_mb", "mapped_mb")
    figures = {key: [1.0] for key in keys}
    return {"1": one, "2": two, "bytes_an_image": 110_000, **figures}


LOADERS = {
    FULL: {
        "Trainyard, WebDataset": loader([1500, 1600, 1700], [3000, 3100, 3200]),
        "timm": loader([390, 400, 410], []),
    },
    SMALL: {"FFCV, raw": loader([3000], [3300])},
}


@pytest.mark.slow
def test_the_tables_have_medians_spreads_and_ratios() -> None:
    full, small = loader_tables(LOADERS)
    assert full.rows[0][:5] == [
        "Trainyard, WebDataset", "1,600 (1,500 to 1,700)", "3,100 (3,000 to 3,200)", "1.94", "1.00"
    ]  # fmt: skip
    assert full.rows[1][:5] == ["timm", "400 (390 to 410)", "", "", "4.00"]
    assert small.rows[0][3:5] == ["1.10", ""]  # ours is not among these
    assert full.markdown().count("\n| ") == 4


# --- the comparison of estimates with what others have published ---


def cell(source: str, longer: float) -> Cell:
    return Cell(source, "resnet50", "h100", 1.0, 1.0, longer)


def test_a_source_counts_once() -> None:
    """Five lengths of one recipe made the median theirs; a guess is no second source."""
    many = [cell("A", longer) for longer in (1.05, 1.06, 1.07, 1.08, 1.09)]
    cells = [*many, cell("B, one guess", 1.0), cell("B, another", 1.6), cell("C", 0.5)]
    assert by_source(cells) == pytest.approx({"A": 1.07, "B": 1.3, "C": 2.0})
    assert typical(cells) == pytest.approx(1.3)


# --- which runs benchmarks/convergence.py still wants ---


@pytest.mark.slow
def test_finished_runs_are_not_repeated_and_tests_wait_for_the_rate(tmp_path: Path) -> None:
    names = ["all-reduce", "sharded"]
    options = argparse.Namespace(folder=tmp_path, replicas=4, epochs=2, only=names, seeds=2)
    found: list[Run] = []
    while tuning := [job for job in next_jobs(found, options) if job.run["held_out"]]:
        assert {job.run["contender"] for job in tuning} == {"all-reduce"}
        assert {job.run["seed"] for job in tuning} <= {*TUNING}
        assert "data.val_share" in tuning[0].keys
        run = tuning[0].run
        found.append(run | {"top1": 0.9, "loss": abs(float(run["lr"]) - 0.4)})
    finals = [job.run for job in next_jobs(found, options)]
    assert [(run["contender"], run["seed"]) for run in finals] == [
        ("all-reduce", 0),
        ("sharded", 0),
        ("all-reduce", 1),
        ("sharded", 1),
    ]
    assert {run["lr"] for run in finals} == {0.4}
    done = next_jobs(found, options)[1]
    left = [job.run for job in next_jobs([*found, done.run | {"top1": 0.9}], options)]
    assert left == [run for run in finals if run != done.run]


# --- replicas of one process against those of several: benchmarks/simulated.py ---


RANKS = 4
AVERAGES: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "gossip"},
    {"name": "gossip", "overlap": False, "topology": "ring"},
    {"name": "gossip", "topology": "benchmarks.convergence:with_more_global_rounds"},
    {"name": "periodic", "every": 2},
]


@pytest.mark.night
def test_one_process_has_the_figures_of_several(tmp_path: Path) -> None:
    tiles.write(tmp_path / "tiles", (512, 200))
    prepare(tmp_path, tmp_path / "tiles")
    team = Team(RANKS)
    for number, average in enumerate(AVERAGES):
        keys = recipe(tmp_path, epochs=1, seed=number, held_out=False)
        keys |= {f"average.{key}": value for key, value in average.items()}
        keys |= {"batch.size": 64, "batch.precision": "fp32", "optim.lr": 0.1}
        job = Job({}, keys, RANKS)
        team.start(job, tmp_path / f"{number}")
        found, own = team.finish(), simulated(0, job, 0, tmp_path / "none")
        assert own["steps"] == found["steps"] == 8
        assert own["loss"] == pytest.approx(found["loss"], rel=1e-4)
        assert own["top1"] == pytest.approx(found["top1"], abs=0.006)  # one tile of 200
        if average["name"] != "allreduce":  # it has no distances
            assert own["distances"] == pytest.approx(found["distances"], rel=1e-3)
    team.end()
    assert not (tmp_path / "none").exists()
