"""A miniature ILSVRC2012: the three official archives with the same structure, and five classes.

Each class is a colour of its own with noise, so that a model can learn them. One training image
is a PNG named .JPEG and one is a CMYK JPEG, as in the real archives.
"""

import gzip
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from tests.images import encode

# In the order of their ILSVRC2012_IDs, which is not that of the sorted WNIDs.
LEAVES = {
    "n02119789": "kit fox, Vulpes macrotis",
    "n02100735": "English setter",
    "n02110185": "Siberian husky",
    "n02105855": "Shetland sheepdog, Shetland sheep dog, Shetland",
    "n02102040": "English springer, English springer spaniel",
}
ANCESTORS = {"n02083346": "canine, canid", "n00001740": "entity"}
WNIDS = tuple(sorted(LEAVES))
PNG_IN_DISGUISE = "n02105855_2933.JPEG"
CMYK = "n02100735_20.JPEG"
_COLOURS = {
    "n02119789": (200, 90, 40),
    "n02100735": (230, 220, 200),
    "n02110185": (90, 100, 130),
    "n02105855": (60, 160, 70),
    "n02102040": (40, 30, 120),
}


@dataclass(frozen=True)
class MiniImageNet:
    """What the archives hold: encoded images by class and by name."""

    folder: Path
    train: dict[str, dict[str, bytes]]
    val: dict[str, dict[str, bytes]]

    def pairs(self, split: str) -> list[tuple[int, bytes]]:
        """Sorted (class number, encoded image) of "train" or "val"."""
        content = self.train if split == "train" else self.val
        return sorted((WNIDS.index(w), i) for w, images in content.items() for i in images.values())


def write_mini_imagenet(folder: Path, per_class: int = 12, val_per_class: int = 4) -> MiniImageNet:
    """Write ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(2012)
    train = {
        # Numbers of several widths: sorted names are not sorted numbers.
        wnid: {f"{wnid}_{9 * n + 2}.JPEG": jpeg(wnid, random) for n in range(per_class)}
        for wnid in LEAVES
    }
    train["n02105855"][PNG_IN_DISGUISE] = encode(pixels("n02105855", random), "PNG")
    train["n02100735"][CMYK] = encode(pixels("n02100735", random).convert("CMYK"), "JPEG")
    ids = random.permutation(np.repeat(np.arange(1, len(LEAVES) + 1), val_per_class))
    val: dict[str, dict[str, bytes]] = {wnid: {} for wnid in LEAVES}
    for number, ilsvrc_id in enumerate(ids, start=1):
        wnid = tuple(LEAVES)[ilsvrc_id - 1]
        val[wnid][f"ILSVRC2012_val_{number:08d}.JPEG"] = jpeg(wnid, random)
    inner = {f"{wnid}.tar": tar_of(images) for wnid, images in train.items()}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    flat = {name: image for images in val.values() for name, image in images.items()}
    # By class, so not in the order of their names.
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar_of(flat))
    write_devkit(folder / "ILSVRC2012_devkit_t12.tar.gz", ids.tolist())
    return MiniImageNet(folder, train, val)


def write_devkit(path: Path, val_ids: list[int]) -> None:
    """The devkit with its two files that matter and one that does not."""
    lines = "".join(f"{ilsvrc_id}\n" for ilsvrc_id in val_ids)
    top = "ILSVRC2012_devkit_t12"
    contents = {
        f"{top}/readme.txt": b"a miniature",
        f"{top}/data/ILSVRC2012_validation_ground_truth.txt": lines.encode(),
        f"{top}/data/meta.mat": _meta_mat(),
    }
    path.write_bytes(gzip.compress(tar_of(contents), mtime=0))


def _meta_mat() -> bytes:
    fields = (
        *("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children"),
        *("wordnet_height", "num_train_images"),
    )
    synsets = np.zeros((len(LEAVES) + len(ANCESTORS), 1), [(field, object) for field in fields])
    for row, (wnid, words) in enumerate((LEAVES | ANCESTORS).items()):
        children = [] if wnid in LEAVES else list(range(1, len(LEAVES) + 1))
        number = np.array([[float(row + 1)]])
        synsets[row, 0] = (
            *(number, wnid, words, f"what a {words} is", np.array([[float(len(children))]])),
            *(np.array([children], float), np.array([[0.0]]), np.array([[1300.0]])),
        )
    file = io.BytesIO()
    savemat(file, {"synsets": synsets}, format="5", do_compression=True)
    return file.getvalue()


def tar_of(contents: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def jpeg(wnid: str, random: np.random.Generator) -> bytes:
    return encode(pixels(wnid, random), "JPEG")


def pixels(wnid: str, random: np.random.Generator) -> Image.Image:
    height, width = random.integers(48, 80, 2)
    noise = random.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(noise + _COLOURS[wnid], 0, 255).astype(np.uint8))
