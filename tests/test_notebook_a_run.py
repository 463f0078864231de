"""notebooks/a-run.ipynb, executed on the digits with a run of two epochs."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainyard
from tests.notebooks import executed, read

pytestmark = pytest.mark.night

pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: make .venv/.peers")
nbformat = pytest.importorskip("nbformat")
LENGTH = '"8 epochs"'


def test_it_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = read("a-run.ipynb")
    (cell,) = [cell for cell in notebook.cells if LENGTH in cell.source]
    cell.source = cell.source.replace(LENGTH, '"2 epochs"')
    mistake = nbformat.v4.new_code_cell('trainyard.evaluate(RUN, overrides={"data.sise": 8})')
    mistake.metadata["tags"] = ["raises-exception"]
    notebook.cells.append(mistake)
    outputs = executed(notebook, tmp_path, monkeypatch)
    assert [out.text for out in outputs if out.get("name") == "stderr"] == []
    shown = [out.data for out in outputs if "data" in out]
    pictures = [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]
    assert len(pictures) == 5
    for picture in pictures:
        assert np.asarray(Image.open(io.BytesIO(picture)).convert("L")).std() > 5  # not blank

    # Training prints a row for each epoch, below a live line that is drawn in place.
    printed = "".join(out.get("text", "") for out in outputs)
    assert len(re.findall(r"^ +[12]\.0 +\d+ +\S+%", printed, re.MULTILINE)) == 2
    (live,) = [data for data in shown if "images/s" in data["text/plain"]]
    assert re.search(r"epoch 2\.0/2 .* 100% 0:00:00 left", live["text/plain"])
    assert "100%" in live["text/html"]
    assert "\x1b" not in printed

    run = tmp_path / "runs" / "a-run"
    said = trainyard.predictions(run).scores
    assert f"{(said.rank_of_truth > 1).sum()} of 364 images are wrong" in printed
    (last,) = re.findall(r"loss (?:\S+) at first, (\S+) at the end", printed)
    assert float(last) < 1
    (error,) = [out.traceback for out in outputs if out.output_type == "error"]
    assert error == ["RecipeError: unknown recipe key 'data.sise'; did you mean 'batch.size'?"]
    top1 = trainyard.history(run).val[-1]["top1"]
    assert re.search(rf"^top-1 {top1:.2%} ", printed, re.MULTILINE)
