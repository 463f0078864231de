"""Imports only go down (docs/architecture.md), and functions stay small."""

import ast
import copy
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, TypeGuard

import pytest

from tests.size import tokens_of
from tests.tiers import in_parts
from tests.twins.__main__ import differences

PACKAGE = Path(__file__).parent.parent / "trainyard"

# From the bottom up. Units of one level do not know each other, unless both are named in SIBLINGS.
LEVELS = [
    {
        "arguments",
        "world",
        "cgroups",
        "files",
        "errors",
        "section",
        "course",
        "parent",
        "pickle_records",
        "hardware",
        "hints",
        "image_size",
        "installation",
        "interrupts",
        "printable",
        "children",
        "streams",
        "own_code",
    },
    {"data", "model", "optim", "averaging", "monitor"},
    {"datasets", "distributed"},
    {"training"},
    {"config", "compare"},
    {"run"},
    {"classifier"},
    {"api", "published", "torch", "numpy"},
    {"doctor", "estimate", "export", "launch", "report"},
    {"cli", "command_line", "__main__"},
]
SIBLINGS = {
    ("world", "errors"),
    ("section", "errors"),
    ("world", "cgroups"),
    ("course", "errors"),
    ("course", "image_size"),
    ("files", "errors"),
    ("compare", "config"),
    ("numpy", "torch"),
    ("own_code", "errors"),
    ("own_code", "files"),
    ("own_code", "hints"),
    ("own_code", "printable"),
    ("hardware", "errors"),
    ("installation", "errors"),
    ("hardware", "hints"),
    ("__main__", "command_line"),
    ("command_line", "cli"),
    ("doctor", "estimate"),  # the size of a checkpoint
}
# The loop and the step know batches, and else protocols only: run/ builds what they use.
FORBIDDEN_TO_TRAINING = {"data", "model", "optim"}
BATCH = "data.batch."

# The way of an image, from the bottom up: the same rule inside trainyard/data.
DATA = [
    "_native",
    "arrays",
    "rng",
    "batch",
    "storage",
    "formats",
    "index",
    "sampler",
    "reading",
    "decode",
    "config",
    "loader",
    "stream",
    "augment",
    "device",
    "order",
    "feeds",
    "open_datasets",
]

# Without trainyard itself, which only re-exports.
MODULES = sorted({*PACKAGE.rglob("*.py")} - {PACKAGE / "__init__.py"})
TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def unit_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def level_of(unit: str) -> int:
    return next(number for number, units in enumerate(LEVELS) if unit in units)


def imported_modules(tree: ast.AST) -> set[str]:
    """Dotted names below `trainyard.`, also those that functions import."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainyard":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names if a.name.startswith("trainyard.")}
    return {name.removeprefix("trainyard.") for name in names}


def violations(unit: str, imported: set[str]) -> list[str]:
    wrong = []
    for name in imported:
        other = name.split(".")[0]
        is_down = level_of(other) < level_of(unit) or (unit, other) in SIBLINGS
        is_part = other in FORBIDDEN_TO_TRAINING and not name.startswith(BATCH)
        if other != unit and (not is_down or (unit == "training" and is_part)):
            wrong.append(f"{unit} imports {name}")
    return wrong


def violations_in_data(room: str, imported: set[str]) -> list[str]:
    others = {name.split(".")[1] for name in imported if name.startswith("data.")}
    return [f"{room} imports {o}" for o in sorted(others) if DATA.index(o) > DATA.index(room)]


def test_imports_go_down() -> None:
    wrong = []
    for path, tree in TREES.items():
        imported = imported_modules(tree)
        wrong += violations(unit_of(path), imported)
        if unit_of(path) == "data" and path != PACKAGE / "data" / "__init__.py":
            room = path.relative_to(PACKAGE / "data").parts[0].removesuffix(".py")
            wrong += violations_in_data(room, imported)
    assert wrong == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count; imports for type checkers do not."""
    names = set(map(dotted, MODULES))
    graph = {}
    for path, tree in TREES.items():
        found = imported_modules(Untyped().visit(copy.deepcopy(tree)))
        graph[dotted(path)] = {
            name if name in names else name.rpartition(".")[0] for name in found
        } - {dotted(path)}
    TopologicalSorter(graph).prepare()  # CycleError names the modules


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


class Untyped(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def _lines(node: ast.stmt | ast.expr) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _is_error(node: ast.AST) -> TypeGuard[ast.Call]:
    """True for a call that makes an error, whose text has lines of its own."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error")


def test_functions_are_small() -> None:
    """An error counts as one line, however long its text is."""
    wrong = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = _lines(node) - sum(_lines(n) - 1 for n in ast.walk(node) if _is_error(n))
                limit = 60 if (unit_of(path), node.name) in ROOMY else 42
                wrong += [f"{path}: {node.name} has {length} lines"] * (length > limit)
    assert wrong == []


# The composition root, the loop, and the arguments of the loader for other loops.
ROOMY = {("run", "build_parts"), ("run", "loop"), ("torch", "loader")}


def test_the_loop_is_short_and_has_few_branches() -> None:
    nodes = ast.walk(TREES[PACKAGE / "run" / "trainer.py"])
    loop = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "loop")
    assert (loop.end_lineno or 0) - loop.lineno < 60
    assert sum(isinstance(node, ast.If) for node in ast.walk(loop)) <= 7


# --- what counts as a token of code ---


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("", 0),
        ("x = 1", 3),
        ("x = 1  # one", 3),
        ("# one\n\n\nx = 1\n", 3),
        ('"""A module."""\nx = "text"\n', 3),
        ('x = 1\n"""An attribute."""\n', 3),
        ('def f():\n    """Over\n    lines."""\n    return x\n', 7),
        ("f(\n    x,\n)\n", 5),  # as many as in one line, but for the comma
    ],
)
def test_comments_docstrings_and_blank_lines_are_no_code(source: str, tokens: int) -> None:
    assert tokens_of(source) == tokens


# --- the order of tests in a session of several processes ---


class Item:
    """A test of a file, with the names of its markers."""

    def __init__(self, path: str, *marks: str) -> None:
        self.path, self.marks = Path(path), marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def test_each_process_gets_quick_ones_and_then_whole_slow_files() -> None:
    slow = {name: [Item(name, "slow") for _ in range(3)] for name in ("a", "services/b")}
    quick = [Item("a"), Item("services/b", "slow", "quick"), Item("c"), Item("c")]
    mixed: list[Any] = [*slow["a"], *quick[:3], *slow["services/b"], quick[3]]
    one: list[Any] = [*quick, *slow["services/b"], *slow["a"]]
    assert in_parts(mixed, 1) == one
    two: list[Any] = [*quick[::2], *slow["services/b"], *quick[1::2], *slow["a"]]
    assert in_parts(mixed, 2) == two


# --- the comparison of `make twins` finds a difference, wherever it is ---


ROW = {"reports": {"train 4": {"loss": 1.25, "lrs": [0.1, 0.2]}}, "output": "a"}


def test_equal_outcomes_have_no_difference() -> None:
    assert [*differences(ROW, ROW | {})] == []


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ({"reports": {"train 4": {"loss": 1.2500000000000002, "lrs": [0.1, 0.2]}}}, "loss"),
        ({"reports": {"train 4": {"loss": 1.25, "lrs": [0.1]}}}, "lrs"),
        ({"reports": {"train 4": {"loss": 1.25, "lrs": [0.1, 0.3]}}}, "lrs / 1"),
        ({"reports": {}}, "reports / train 4"),
        ({"output": "b"}, "output"),
        ({"more": {}}, "more"),
    ],
)
def test_a_difference_is_named(other: dict[str, object], where: str) -> None:
    (found,) = differences(ROW, ROW | other)
    assert where in found
