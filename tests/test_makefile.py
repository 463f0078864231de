"""Each target of the Makefile installs what it needs and no more."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
]


def commands(target: str) -> str:
    """The commands of a target where nothing is there yet."""
    words = ["make", "--dry-run", "--always-make", "--directory", str(ROOT), target]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return text.replace("\\\n", " ")


def installed(target: str) -> set[str]:
    """The packages that a target installs, those of a requirements file included."""
    names = set()
    for words in re.findall(r"-m pip install (.*)", commands(target)):
        for file in re.findall(r"--requirement (\S+)", words):
            names |= set(re.findall(r"^[\w.-]+", (ROOT / file).read_text(), re.MULTILINE))
        plain = re.sub(r"--(requirement|constraint|editable) \S+|--\S+", "", words)
        names |= {word.partition("==")[0] for word in plain.split()}
    return {normal(name) for name in names}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- make docs ---


def test_the_documentation_needs_no_cuda_dali_or_ray() -> None:
    assert installed("docs") == {
        *("mkdocs-material", "mkdocstrings-python"),
        *("numpy", "pillow", "pydantic", "ruff"),
    }


def test_reference_pages_are_made_of_that_alone() -> None:
    """Other packages of this environment are hidden from the hook of mkdocs."""
    hidden = {"torch", "timm", "rich", "safetensors", "yaml", "aiohttp", "crc32c", "ray"}
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({sorted(hidden)}))\n"
    code += "sys.path.insert(0, '.')\n"
    code += "pages = runpy.run_path('docs/_reference.py')['pages']()\n"
    code += "print(*sorted(pages), pages['python.md'].count(':::'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "commands.md errors.md exit-codes.md python.md recipe-keys.md recipes.md "
    )
    assert int(done.stdout.split()[-1]) > 20


# --- make bench ---


def test_benchmarks_import_only_what_make_bench_installs() -> None:
    there = installed("bench")
    distributions = packages_distributions()
    missing = {}
    for path in bench_modules():
        for name in set(imported(path)) - {"trainyard", "benchmarks"}:
            # A module that is not here cannot be looked up: it has the name of its package.
            packages = {normal(package) for package in distributions.get(name, [name])}
            if not packages & there:
                missing[name] = path.name
    assert missing == {}


def bench_modules() -> set[Path]:
    """The benchmarks of `make bench` and what they import of each other, peers aside.

    A peer of the loader's runs in an environment that the benchmark itself makes.
    """
    queue = re.findall(r"-m (benchmarks\.\w+)", commands("bench"))
    assert len(queue) > 3
    found: set[Path] = set()
    while queue:
        path = ROOT / f"{queue.pop().replace('.', '/')}.py"
        if path.is_file() and path not in found:
            found.add(path)
            queue += re.findall(r"^\s*from (benchmarks[\w.]*) import", path.read_text(), re.M)
    return found


def imported(path: Path) -> Iterator[str]:
    """Modules from elsewhere that a file imports, also within functions and by their names."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
        yield from (name.partition(".")[0] for name in names if not is_standard(name))


def is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names
