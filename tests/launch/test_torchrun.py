"""`train` started by torchrun joins that world; the README says how to write it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_train_under_torchrun(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--"]
    command += ["trainyard", "train", "debug", "--data", str(digits), "--run", str(folder)]
    command += ["--run.length", "2 steps", "--run.log_every", "1 step"]

    subprocess.run(command, check=True, timeout=200, capture_output=True, cwd=tmp_path)

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    (val,) = [line for line in lines if line["kind"] == "val"]
    assert val["evaluated"] == 364
    assert "`torchrun --nproc-per-node 2 -m -- trainyard train" in (ROOT / "README.md").read_text()
