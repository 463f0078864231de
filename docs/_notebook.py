"""The notebook of a page: `python docs/_notebook.py` writes notebooks/twelve-minutes.ipynb."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebook(page: str) -> str:
    """The page's text, its programs as files, and its commands, as cells."""
    text, *blocks = _BLOCK.split(page)
    cells = [("markdown", text), ("code", "%cd -q ..")]
    for language, code, after in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True):
        name, _, program = code.partition("\n")
        is_file = language == "python"
        cell = f"%%writefile {name[2:]}\n{program}" if is_file else f"%%bash -e\n{code}"
        cells += [("code", cell), ("markdown", after)]
    written = [_cell(*cell, number) for number, cell in enumerate(cells) if cell[1].strip()]
    metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    content = {"cells": written, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str, number: int) -> dict[str, object]:
    if kind == "markdown":
        text = text.replace("](", "](../docs/")
    source = text.strip().splitlines(keepends=True)
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


if __name__ == "__main__":
    page = (ROOT / "docs" / "twelve-minutes.md").read_text(encoding="utf-8")
    (ROOT / "notebooks" / "twelve-minutes.ipynb").write_text(notebook(page), encoding="utf-8")
