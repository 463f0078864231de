"""The size of the code: its tokens, without comments, docstrings and blank lines.

python -m tests.size prints them for each folder of trainyard/, with the difference to the last
commit on main, and fails above the limit in pyproject.toml.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def tokens_of(source: str) -> int:
    """Tokens of a module that are code."""
    texts = _bare_strings(ast.parse(source))
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in _NO_CODE and token.start not in texts for token in found)


def _bare_strings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where statements begin that are a string alone: docstrings, of attributes too."""
    expressions = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {
        (node.lineno, node.col_offset)
        for node in expressions
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def by_folder(modules: Iterable[tuple[Path, str]]) -> Counter[str]:
    """Tokens of each folder of trainyard/, from the paths and sources of modules."""
    sizes = Counter[str]()
    for path, source in modules:
        sizes[path.parts[1] if len(path.parts) > 2 else "."] += tokens_of(source)
    return sizes


def _now() -> Iterable[tuple[Path, str]]:
    for path in (ROOT / "trainyard").rglob("*.py"):
        yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def _landed() -> Iterable[tuple[Path, str]]:
    """The modules of the last commit on main; none outside of a clone."""
    for name in ("origin/main", "main"):
        command = ["git", "-C", str(ROOT), "archive", name, "trainyard"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            return _modules_in(done.stdout)
    return []


def _modules_in(archive: bytes) -> Iterable[tuple[Path, str]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.name.endswith(".py") and (file := tar.extractfile(member)):
                yield Path(member.name), file.read().decode()


def main() -> int:
    """Print the table. Returns 1 above the limit, else 0."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    limit = project["tool"]["trainyard"]["most_tokens"]
    now, landed = by_folder(_now()), by_folder(_landed())
    sizes = {**dict(now.most_common()), "all": now.total()}
    before = landed | Counter({"all": landed.total()})
    for folder, size in sizes.items():
        print(f"{folder:12}{size:9,}", f"{size - before[folder]:+8,}" if landed else "")
    total = now.total()
    if total > limit:
        print(f"above {limit:,}, most_tokens in pyproject.toml: delete, or raise it and say why")
    return int(total > limit)


if __name__ == "__main__":
    sys.exit(main())
