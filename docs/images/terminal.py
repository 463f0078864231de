"""Draws terminal.svg: a run of the digits.

    python docs/images/terminal.py data/digits

The run is a real one, two minutes on two cores; what is drawn is what a terminal shows of its
reports well before the end.
"""

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from trainyard.config import load_recipe
from trainyard.course import build_course
from trainyard.monitor.console import ConsoleSink, LiveLine
from trainyard.run.trainer import train
from trainyard.world import World

HERE = Path(__file__).parent
WIDTH = 100
UNTIL = 22.1  # epochs of 24
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Without fonts from elsewhere."""
COMMAND = "$ trainyard train digits"


def main(data: str) -> None:
    with TemporaryDirectory() as folder:
        overrides = {"data.train": f"{data}/train", "data.val": f"{data}/val"}
        overrides["watch.bounds_minutes"] = "0"  # a longer line than the picture is wide
        recipe = load_recipe("digits", overrides)
        train(recipe, folder, world=World(), console=Console(quiet=True))
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    draw([json.loads(line) for line in lines])


def draw(reports: list[dict[str, Any]]) -> None:
    images = round(reports[-1]["samples"] / reports[-1]["epoch"])
    course = build_course("24 epochs", epoch_samples=images, batch=64, image_size=32)
    with open("/dev/null", "w") as nowhere:
        console = Console(
            record=True, width=WIDTH, force_terminal=True, force_interactive=False, file=nowhere
        )
        console.print(COMMAND, style="bold", highlight=False)
        sink, live = ConsoleSink(course, 10, console), LiveLine(console, course.num_steps, "24")
        for report in reports:
            live.show(report)
            if report["kind"] != "train":
                sink.write(report)
            elif report["epoch"] > UNTIL:
                break
        console.print(live)
        console.save_svg(str(HERE / "terminal.svg"), title="trainyard", code_format=FORMAT)


if __name__ == "__main__":
    main(sys.argv[1])
