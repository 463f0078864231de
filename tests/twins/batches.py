"""Prints digests of a data set's first 50 training batches, by the documented loader.

python tests/twins/batches.py LOCATION
"""

import hashlib
import json
import sys

import trainyard
from trainyard import Loader, LoaderSpec, RandomResizedCrop, ShuffledPlan

if __name__ == "__main__":
    index = trainyard.open_index(sys.argv[1])
    spec = LoaderSpec(
        plan=ShuffledPlan(len(index), global_batch=48, seed=7),
        crop=RandomResizedCrop(7, (0.35, 1.0), (0.75, 4 / 3), 0.5),
        image_size=40,
        start=0,
        stop=50,
        channels=4 if "arrays" in sys.argv[1] else 3,
    )
    with Loader(index, spec) as batches:
        for batch in batches:
            pixels = hashlib.sha256(batch.images_BHWC.tobytes()).hexdigest()[:16]
            print(json.dumps([pixels, batch.ids.tolist(), batch.labels.tolist()]))
