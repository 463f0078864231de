"""Reads the ILSVRC2012 development kit: the class of each validation image.

The kit numbers classes by ILSVRC2012_ID, which is not the usual order of labels, by sorted WordNet
IDs (WNIDs).
"""

import io
import re
from dataclasses import dataclass
from pathlib import Path

from trainyard.datasets.prepare.targz import read_members
from trainyard.errors import DataError
from trainyard.installation import install_hint

_META = "data/meta.mat"
_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_MAX_BYTES = 64 << 20  # unpacked; the official kit is 2.5 MB packed
_WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Devkit:
    wnid_of: dict[int, str]
    """WNID by ILSVRC2012_ID, for leaves of the hierarchy: the classes with images."""
    val: tuple[int, ...]
    """The ILSVRC2012_ID of each validation image, by the number in its name, from 1."""

    def val_wnid(self, number: int) -> str:
        """The class of ILSVRC2012_val_<number>.JPEG. IndexError if there is no such image."""
        if number < 1:
            raise IndexError(number)
        return self.wnid_of[self.val[number - 1]]


def read_devkit(path: Path) -> Devkit:
    """Reads ILSVRC2012_devkit_t12.tar.gz in memory; needs scipy."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataError("prepare.needs-scipy", hint=install_hint("imagenet")) from None
    contents = read_members(path, (_META, _TRUTH), _MAX_BYTES)
    try:
        synsets = loadmat(io.BytesIO(contents[_META]), squeeze_me=True)["synsets"]
        wnid_of = {
            int(synset["ILSVRC2012_ID"]): str(synset["WNID"])
            for synset in synsets
            if not int(synset["num_children"])
        }
        val = tuple(int(line) for line in contents[_TRUTH].split())
    except Exception as error:  # loadmat raises almost any error for a damaged file
        raise DataError("prepare.not-the-devkit", path=path, reason=str(error)) from None
    strange = [wnid for wnid in wnid_of.values() if not _WNID.fullmatch(wnid)]
    if strange:  # WNIDs become folder names
        raise DataError("prepare.not-a-wordnet-id", path=path, name=strange[0], member=_META)
    unknown = set(val) - set(wnid_of)
    if unknown:
        raise DataError(
            "prepare.undefined-class", path=path, member=_TRUTH, label=min(unknown), other=_META
        )
    return Devkit(wnid_of, val)
