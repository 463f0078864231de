"""Loaders and decoders of the field beside ours: images a second, first batch, memory, quality.

python -m benchmarks.loader FOLDER --install [--turbo CHECKOUT]     once, 15 minutes
python -m benchmarks.loader FOLDER [--quick] [--hardware NAME]      20 minutes; quick: 5

The first makes 2,000 photographs like ImageNet's in FOLDER/data, in every format that a contender
asks for (5 GB), and an environment for each peer in FOLDER/environments (2 GB beside the main one).
What is missing later is made then, or left out and said.

First decoders alone: see loaders/decoders.py. Then whole loaders: each decodes random crops of
224 x 224, antialiased unless said, flips them and gives torch batches of 64 in uint8. Each is
measured in a process of its own, pinned to one core, then to two, in an order drawn anew each
round; the files lie in memory. Medians and spreads are over rounds. Among them are our decoders
without a loader, of images in memory into one place, which whole loaders are compared with.

The yardstick is libjpeg-turbo's own crop decode and a resize in C (loaders/yardstick): the one
that --turbo compiles, a checkout of its sources, or else the system's.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.loaders.catalogue import CONTENDERS, Contender
from benchmarks.loaders.decoders import YARDSTICK
from benchmarks.loaders.environments import PEERS, install, python_of
from benchmarks.loaders.tables import (
    Table,
    decoder_tables,
    draw,
    loader_tables,
    share_table,
)
from benchmarks.loaders.variants import make_source, make_variant, read_all, size_of
from benchmarks.loaders.yardstick.build import build_turbo, build_yardstick
from benchmarks.saving import RESULTS, listed, save
from trainyard.cli.printing import print_table

_LIMIT_S = 120  # of one measurement
_FIGURES = ("first_batch_s", "import_s", "anonymous_mb", "torch_mb", "mapped_mb")
_NOTES = (
    "The yardstick, ratio 1.00, is libjpeg-turbo's crop decode and a resize in C. dB: PSNR of each "
    "crop against Pillow's full decode and antialiased resize (median, 5th percentile, least). "
    "FFCV resizes by OpenCV's INTER_AREA, SPDL by FFmpeg's bilinear scaler. Memory is on one core, "
    "of all processes, in proportion to who shares it; that of no file has in it what torch takes "
    "when imported. Import has torch in it, and a peer's own dependencies."
)

Loaders = dict[str, dict[str, Any]]


def set_up(folder: Path, images: int, turbo: Path | None) -> None:
    """Environments, the yardstick and the data; says what cannot be made, and why."""
    if turbo is not None:
        build_turbo(turbo, folder)
    build_yardstick(folder)
    for name in PEERS:
        print(f"{name}: {install(folder, name) or 'ready'}", flush=True)
    make_source(folder, images)
    for contender in CONTENDERS:
        try:
            _data_of(folder, contender)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{contender.title}: {error}", flush=True)


def run_decoders(folder: Path, images: int, rounds: int) -> dict[str, Any]:
    python = python_of(folder, "decoders") or sys.executable
    words = [str(python), "-m", "benchmarks.loaders.decoders", str(folder)]
    words += ["--images", str(images), "--rounds", str(rounds)]
    result = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def run_loaders(
    folder: Path, contenders: list[Contender], options: argparse.Namespace
) -> tuple[Loaders, dict[str, str]]:
    """Figures by group and name, and why some were left out."""
    found: Loaders = {}
    left_out: dict[str, str] = {}
    places = {}
    for contender in contenders:
        try:
            places[contender] = _data_of(folder, contender)
        except (OSError, subprocess.CalledProcessError) as error:
            left_out[contender.title] = str(error)
    for contender, place in places.items():
        about = {key: [] for key in ("1", "2", *_FIGURES)} | {
            "bytes_an_image": size_of(place) / options.images
        }
        found.setdefault(contender.group, {})[contender.name] = about
    for number in range(options.rounds):
        for cores in (1, 2)[: len(os.sched_getaffinity(0))]:
            for contender in _in_turn(list(places), number, cores):
                if contender.title in left_out:
                    continue
                result = measure(folder, contender, places[contender], cores, options.seconds)
                if isinstance(result, str):
                    left_out[contender.title] = result
                else:
                    _note(found[contender.group][contender.name], result, cores)
                _say(number, cores, contender, result)
    return found, left_out


def _data_of(folder: Path, contender: Contender) -> Path:
    if python_of(folder, contender.environment) is None:
        raise OSError(f"no environment {contender.environment}: run with --install")
    return make_variant(folder, contender.variant)


def _in_turn(contenders: list[Contender], number: int, cores: int) -> list[Contender]:
    chosen = [c for c in contenders if cores == 1 or c.has_two_cores]
    random.Random(f"{number} {cores}").shuffle(chosen)
    return chosen


def measure(
    folder: Path, contender: Contender, place: Path, cores: int, seconds: float
) -> dict[str, Any] | str:
    """One contender in a process of its own; the reason if it fails."""
    read_all(place)
    module = f"benchmarks.loaders.peers.{contender.module}"
    words = [str(python_of(folder, contender.environment)), "-m", "benchmarks.loaders.measure"]
    words += [module, contender.function, "--data", str(place), "--cores", str(cores)]
    words += ["--seconds", str(seconds)]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"took more than {_LIMIT_S} s"
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"import_s"')]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    said = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return said[-1] if said else f"ended with {result.returncode}"


def _note(about: dict[str, Any], result: dict[str, Any], cores: int) -> None:
    about[str(cores)].append(result["images_per_second"])
    if cores == 1:
        for key in _FIGURES:
            about[key].append(result[key])


def _say(number: int, cores: int, contender: Contender, result: dict[str, Any] | str) -> None:
    rate = result if isinstance(result, str) else f"{result['images_per_second']:,.0f}"
    where = f"round {number + 1}, {cores} core{'s' * (cores > 1)}"
    print(f"{where}: {contender.title}: {rate}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--install", action="store_true", help="make environments and data, then end"
    )
    parser.add_argument("--turbo", type=Path, help="with --install: a checkout of libjpeg-turbo")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="one round of the main contenders")
    parser.add_argument("--only", help="contenders whose name or environment has this word")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-loader.json, .md and .svg")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 1.0
    return options


def chosen(options: argparse.Namespace) -> list[Contender]:
    word = (options.only or "").lower()
    return [
        contender
        for contender in CONTENDERS
        if word in f"{contender.name} {contender.environment}".lower()
        and not (options.quick and contender.is_minor)
    ]


def main() -> None:
    options = parse()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.install:
        set_up(folder, options.images, options.turbo)
        return
    if not (folder / "yardstick.so").exists():
        build_yardstick(folder)
    load = os.getloadavg()[0]
    source = make_source(folder, options.images)
    make_variant(folder, "small")
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "hardware": options.hardware,
        "images": options.images,
        "mean_bytes": round(size_of(source) / options.images),
        "rounds": options.rounds,
        "seconds": options.seconds,
    }
    decoders = run_decoders(folder, min(options.images, 512), 3 if options.quick else 7)
    loaders, left_out = run_loaders(folder, chosen(options), options)
    about |= {key: decoders[key] for key in ("libjpeg_turbo", "path")}
    about["load_before_and_after"] = [round(load, 1), round(os.getloadavg()[0], 1)]
    figures = about | {"decoders": decoders["decoders"], "loaders": loaders, "left_out": left_out}
    tables = [
        *decoder_tables(decoders["decoders"], YARDSTICK),
        *loader_tables(loaders),
        share_table(loaders),
    ]
    show(tables, figures, as_json=options.json)
    if options.hardware:
        keep(options.hardware, about, tables, figures)


def show(tables: list[Table], figures: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for table in tables:
        print(f"\n{table.title}")
        _, columns, rows = table.brief()
        print_table(columns, rows)
    for name, reason in figures["left_out"].items():
        print(f"left out: {name}: {reason}")


def keep(
    hardware: str, about: dict[str, Any], tables: list[Table], figures: dict[str, Any]
) -> None:
    name = f"{hardware}-loader"
    parts = [f"# Loaders, {hardware}", listed(about), _NOTES]
    parts += [f"## {table.markdown()}" for table in tables if table.rows]
    parts += [f"Left out: {who}: {reason}" for who, reason in figures["left_out"].items()]
    parts.append(f"![Images per second of each loader]({date.today()}-{name}.svg)")
    save(name, figures, "\n\n".join(parts) + "\n")
    draw(RESULTS / f"{date.today()}-{name}.svg", figures["loaders"], f"Whole loaders, {hardware}")


if __name__ == "__main__":
    main()
