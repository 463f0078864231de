"""Comments and docstrings name modules that exist: renamed ones live on in them otherwise."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("trainyard", "tests", "benchmarks", "docs", "release", "examples")
OF_OTHERS = {"train.py", "timm/models/_hub.py"}


def prose(path: Path) -> Iterator[str]:
    """The comments and docstrings of a module."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        # Those of attributes too: strings that stand alone.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def test_modules_that_are_named_exist() -> None:
    modules = [*(ROOT / "trainyard").rglob("*.py"), *(ROOT / "trainyard").rglob("*.pyi")]
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    known = {f"/{path.relative_to(ROOT)}" for path in files if path.suffix in {".py", ".c", ".h"}}
    absent = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules
        for text in prose(path)
        for name in re.findall(r"[\w/-]+\.(?:py|c|h)\b", text)
        if name not in OF_OTHERS and not any(each.endswith(f"/{name}") for each in known)
    ]
    assert not absent, "\n".join(absent)
