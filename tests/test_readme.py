"""The README tells the truth: its tree is the tree, its loop is the loop."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

IN_A_LINE = {
    *("commands", "formats", "remote", "stage", "prepare", "pack", "verify", "randaugment"),
    *("stream", "estimate", "doctor", "export", "report", "trackers", "loading"),
    *("transforms", "device"),
}


def test_every_module_is_in_the_tree_and_every_entry_exists() -> None:
    section = README.split("## The tree")[1].split("##")[0]
    listed = set(re.findall(r"^ {4,}(\S+?)/?  ", section, re.MULTILINE))
    names = {Path(name).name for name in listed}
    modules = [p for p in (ROOT / "trainyard").rglob("*.py") if p.name != "__init__.py"]
    missing = {p for p in modules if p.name not in names}
    # Of these folders the tree has one line each; what it lists there exists.
    in_a_line = {p for p in missing if p.parent.name in IN_A_LINE}
    assert missing == in_a_line
    for folder in IN_A_LINE - {"commands"}:
        listed_in_line = re.search(rf"^ +{folder}/ +([^:,\n]+)", section, re.MULTILINE)
        assert listed_in_line
        stems = {p.stem for p in modules if p.parent.name == folder}
        assert set(listed_in_line[1].split(" · ")) <= stems
    folders = [path for path in ROOT.iterdir() if path.name[0] != "." and path.is_dir()]
    there = {path.name for folder in folders for path in folder.rglob("*")}
    there |= {path.name for path in ROOT.iterdir()}
    for name in names:
        assert name in there, f"{name} is in the README's tree only"


def test_the_loop_is_printed_as_it_is() -> None:
    source = (ROOT / "trainyard" / "training" / "loop.py").read_text()
    loop = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    body = source.splitlines()[loop.body[1].lineno - 1 : loop.end_lineno]
    assert "\n".join(line[4:] for line in body) in README
