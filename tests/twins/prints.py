"""Prints digests: python prints.py LOCATION, of a data set's first 50 training batches by the
documented loader; of an export's logits where it is one, by the library for which it is made.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

_IMAGES = np.random.default_rng(7).normal(size=(4, 3, 32, 32)).astype(np.float32)  # NCHW


def digest(array: Any) -> str:
    kind = f"{array.dtype}{list(array.shape)}"
    return f"{kind} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]}"


def batches(location: str) -> list[Any]:
    import trainyard
    from trainyard import Loader, LoaderSpec, RandomResizedCrop, ShuffledPlan

    index = trainyard.open_index(location)
    spec = LoaderSpec(
        plan=ShuffledPlan(len(index), global_batch=48, seed=7),
        crop=RandomResizedCrop(7, (0.35, 1.0), (0.75, 4 / 3), 0.5),
        image_size=40,
        start=0,
        stop=50,
        channels=4 if "arrays" in location else 3,
    )
    with Loader(index, spec) as loader:
        return [[digest(b.images_BHWC), b.ids.tolist(), b.labels.tolist()] for b in loader]


def logits(path: Path) -> Any:
    import timm
    import torch

    if path.suffix == ".onnx":
        import onnxruntime

        return onnxruntime.InferenceSession(path).run(None, {"images": _IMAGES})[0]
    model = (
        timm.create_model(f"local-dir:{path}", pretrained=True).eval()
        if path.is_dir()
        else torch.export.load(path).module()
    )
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(_IMAGES)))


if __name__ == "__main__":
    given = Path(sys.argv[1])
    is_export = given.suffix in {".onnx", ".pt2"} or (given / "config.json").exists()
    print(json.dumps(digest(logits(given)) if is_export else batches(sys.argv[1])))
