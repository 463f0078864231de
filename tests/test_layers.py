"""Imports only go down (docs/architecture.md), and functions stay small."""

import ast
import copy
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeGuard

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
