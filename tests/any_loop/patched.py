"""timm's train.py and torchvision's reference with the changes of docs/other-loops.md."""

import subprocess
from pathlib import Path

from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "other-loops.md"
FILES = {"timm": "train.py", "vision": "references/classification/train.py"}
# What both have fixed for GPUs, where they have two ranks.
_ON_CPUS = {
    "device_ids=[device], ": "",
    ", device_ids=[args.gpu]": "",
    "torch.cuda.set_device(args.gpu)": "pass",
    '"nccl"': '"gloo"',
    'device="cuda"': 'device="cpu"',
}


def patched(name: str, checkout: Path, folder: Path) -> Path:
    """The changed script in a folder, its neighbours beside it."""
    place = checkout / FILES[name]
    for source in place.parent.glob("*.py"):
        text = source.read_text()
        for old, new in _ON_CPUS.items():
            text = text.replace(old, new)
        (folder / source.name).write_text(text)
    (change,) = (b.text for b in blocks(PAGE) if b.text.startswith(f"--- {name}/"))
    words = ["patch", "--no-backup-if-mismatch", str(folder / place.name)]
    subprocess.run(words, input=change, text=True, check=True, capture_output=True)
    return folder / place.name
