"""Draws terminal.svg and terminal-80.svg: a run of the digits, on 100 and on 80 columns.

    python docs/images/terminal.py data/digits

The run is a real one, two minutes on two cores, and what is drawn is what it wrote; on 80 columns
from the same reports.
"""

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from trainyard.config import load_recipe
from trainyard.course import build_course
from trainyard.monitor.console import ConsoleSink
from trainyard.monitor.notebook import Screen
from trainyard.run.trainer import train
from trainyard.world import World

HERE = Path(__file__).parent
WIDTH = 100
SHOWN = re.compile(r"epoch 22\.[1-6]/24 .* images/s")  # a moment well into the run
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Without fonts from elsewhere."""
COMMAND = "$ trainyard train digits"


def main(data: str) -> None:
    frames: list[str] = []
    with TemporaryDirectory() as folder:
        overrides = {"data.train": f"{data}/train", "data.val": f"{data}/val"}
        recipe = load_recipe("digits", overrides)
        train(recipe, folder, world=World(), console=terminal(frames, WIDTH))
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    frame = next(frame for frame in frames if SHOWN.search(plain(frame)))
    draw(frame, "terminal.svg", WIDTH)
    narrow = replayed([json.loads(line) for line in lines])
    draw(narrow, "terminal-80.svg", 80)


def terminal(frames: list[str], width: int) -> Console:
    """A terminal of which all that is seen, one after the other, is kept in `frames`."""
    screen = cast(IO[str], Screen(frames.append))
    return Console(file=screen, force_terminal=True, color_system="truecolor", width=width)


def replayed(reports: list[dict[str, Any]]) -> str:
    images = round(reports[-1]["samples"] / reports[-1]["epoch"])
    course = build_course("24 epochs", epoch_samples=images, batch=64, image_size=32)
    frames: list[str] = []
    sink = ConsoleSink(course, terminal(frames, 80))
    for report in reports:
        sink.write(report)
        if report["kind"] == "train" and report["epoch"] > 22.1:
            break
    sink.close()
    return frames[-1]


def plain(frame: str) -> str:
    return Text.from_ansi(frame).plain


def draw(frame: str, name: str, width: int) -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=width, force_terminal=True, file=nowhere)
        console.print(COMMAND, style="bold", highlight=False)
        console.print(Text.from_ansi(frame))
        console.save_svg(str(HERE / name), title="trainyard", code_format=FORMAT)


if __name__ == "__main__":
    main(sys.argv[1])
