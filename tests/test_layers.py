"""Imports only go down (design, section 2), and functions stay small."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "trainyard"

# Units of one level do not know each other, unless both are named in SIBLINGS.
LEVELS = [
    {
        "world",
        "files",
        "errors",
        "section",
        "course",
        "parent",
        "hardware",
        "hints",
        "printable",
        "children",
        "early_stop",
    },
    {"data", "model", "optim", "averaging", "monitor"},
    {"distributed"},
    {"training"},
    {"config", "compare"},
    {
        "api",
        "classifier",
        "evaluation",
        "initial",
        "metering",
        "parts",
        "resume",
        "run",
        "teacher",
        "watching",
    },
    {"doctor", "estimate", "export", "launch", "report"},
    {"commands", "__main__"},
]
SIBLINGS = {
    ("world", "errors"),
    ("course", "errors"),
    ("files", "errors"),
    ("early_stop", "errors"),
    ("compare", "config"),
    ("hardware", "errors"),
    ("hardware", "hints"),
    ("api", "run"),  # what a program of one's own calls
    ("api", "evaluation"),
    ("run", "resume"),  # run is the root; resume is the part of it about run directories
    ("run", "parts"),  # and parts what it is built of
    ("run", "evaluation"),
    ("run", "initial"),
    ("run", "teacher"),
    ("run", "watching"),
    ("run", "metering"),
    ("metering", "parts"),
    ("teacher", "parts"),
    ("initial", "parts"),
    ("classifier", "initial"),
    ("classifier", "parts"),
    ("evaluation", "parts"),
    ("__main__", "commands"),
}
# The loop and the step know protocols only: what they run is built and handed in by run.py.
FORBIDDEN_TO_TRAINING = {"data", "model", "optim"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def level_of(unit: str) -> int:
    return next(number for number, units in enumerate(LEVELS) if unit in units)


def imported_units(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "trainyard":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainyard."):
            names.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("trainyard.")}
    return names


def violations(unit: str, imported: set[str]) -> list[str]:
    wrong = []
    for other in imported - {unit}:
        is_down = level_of(other) < level_of(unit) or (unit, other) in SIBLINGS
        if not is_down or (unit == "training" and other in FORBIDDEN_TO_TRAINING):
            wrong.append(f"{unit} imports {other}")
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return  # it only re-exports
    assert violations(unit_of(path), imported_units(ast.parse(path.read_text()))) == []


def test_the_check_sees_an_import_that_goes_up() -> None:
    tree = ast.parse(
        "def f():\n    from trainyard.run import train\n    import trainyard.data.plan"
    )
    assert sorted(violations("monitor", imported_units(tree))) == [
        "monitor imports data",
        "monitor imports run",
    ]
    assert violations("training", {"data"}) == ["training imports data"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_are_small(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            limit = 60 if (unit_of(path), node.name) in ROOMY else 42
            assert length <= limit, f"{node.name} has {length} lines"


ROOMY = {("run", "_train_in"), ("training", "train")}  # the composition root and the loop


def test_the_loop_is_short_and_has_few_branches() -> None:
    tree = ast.parse((PACKAGE / "training" / "loop.py").read_text())
    loop = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train")
    assert (loop.end_lineno or 0) - loop.lineno < 60
    assert sum(isinstance(node, ast.If) for node in ast.walk(loop)) <= 7
