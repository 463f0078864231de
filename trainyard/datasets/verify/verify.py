"""Runs all checks of a data set.

Problems make training fail or its result wrong: missing, broken or undecodable data, labels beyond
or beside the class list, and validation images that are trained on. Notes are unusual but can be
trained on: unusual files, broken links, few images in a class, the same image twice in one split.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainyard.data.arrays import Bools
from trainyard.data.decode import lost
from trainyard.data.index.label_space import match_classes
from trainyard.data.index.layout import doubt_about
from trainyard.data.index.learnable import check_learnable, class_remarks
from trainyard.data.index.overlap import same_samples
from trainyard.data.index.splits import all_splits
from trainyard.data.index.table import Index
from trainyard.data.index.val_share import Side, save_part
from trainyard.datasets.verify.checks import Check, Counters, Finding, Result, checked, of_error
from trainyard.datasets.verify.contents import check_contents
from trainyard.datasets.verify.images import Hashes, ImageFindings, examine, same_bytes
from trainyard.datasets.verify.shards import check_listing, find_files, index_anew
from trainyard.errors import DataError

_UNEVEN = 10  # ratio of images in the largest class to those in a rare one
_RARE = 0.01  # share below which a file type is odd among the others


@dataclass(frozen=True)
class VerifiedSplit:
    name: str
    index: Index

    @property
    def has_labels(self) -> bool:
        """True if every label is a class."""
        label = self.index.all_labels()[1]
        return bool(((label >= 0) & (label < len(self.index.classes))).all())

    def finding(self, sample: int, code: str, what: str) -> Finding:
        file, offset, _ = self.index.locate(sample)
        return Finding(code, what, file, offset, sample)


def verify(
    location: str,
    *,
    deep: bool,
    workers: int,
    counters: Counters,
    division: tuple[Side, ...] = (),
) -> list[Check]:
    """Checks all splits of a data set; `deep` decodes every image and finds duplicates.

    `division`: the sides of data without val data. DataError if there is nothing to check, or a
    server fails.
    """
    locations = all_splits(location, is_divided=bool(division))
    files = [find_files(split, named, location) for split, named in locations.items()]
    checks = [*_check_layout(locations), *(check_listing(part) for part in files if part.listed)]
    splits: list[VerifiedSplit] = []
    with tempfile.TemporaryDirectory(prefix="trainyard-verify-") as folder:
        for part in files:
            with counters(f"indexing {part.resolved.location}", None) as progress:
                index, of_files = index_anew(part, Path(folder) / part.split, progress)
            checks += [*of_files, *check_contents(part, index, workers, counters)]
            if index is None:
                continue
            sides = [] if division else [VerifiedSplit(part.split, index)]
            for side in division:
                path = Path(folder) / f"{side.split}-part"
                sides.append(
                    VerifiedSplit(side.split, save_part(index, side, path, part.resolved.location))
                )
            splits += sides
            checks += [check for side in sides for check in _check_rows(side)]
            checks += [check for side in sides for check in _check_lost(side)]
        checks += _check_classes([split for split in splits if split.has_labels])
        checks += _check_overlap(splits) if not division else []
        if deep and splits:
            with counters("decoding images", sum(len(split.index) for split in splits)) as progress:
                images, hashes = examine([split.index for split in splits], workers, progress)
            for split, seen in zip(splits, images, strict=True):
                checks += _check_images(split, seen)
            checks += _check_duplicates(splits, hashes)
    return checks


def _check_layout(locations: Mapping[str, str]) -> Iterator[Check]:
    """Checks that the folders of training data are classes, where a doubt about them is."""
    name, location = next(iter(locations.items()))
    if doubt := doubt_about(location):
        findings = [Finding("data.doubtful-classes", str(doubt))]
        result: Result = "problem" if doubt.is_strong else "note"
        yield checked(name, "layout", "by names and places", findings, otherwise=result)


# --- checks of the index ---


def _check_rows(split: VerifiedSplit) -> Iterator[Check]:
    size, (rows, label) = split.index.size, split.index.all_labels()
    low, middle, high = int(size.min()), int(np.median(size)), int(size.max())
    empty = np.flatnonzero(size == 0)
    text = f"{low:,} to {high:,} bytes, median {middle:,}"
    findings = (split.finding(row, "verify.empty", "the image is empty") for row in empty.tolist())
    yield checked(split.name, "sizes", text, findings, count=len(empty))
    num_classes = len(split.index.classes)
    beyond = np.flatnonzero((label < 0) | (label >= num_classes))
    findings = (
        split.finding(int(rows[number]), "verify.no-class", f"label {label[number]} is no class")
        for number in beyond.tolist()
    )
    text = f"0 to {num_classes - 1:,}"
    yield checked(split.name, "labels", text, findings, count=len(beyond))
    if not len(beyond):
        yield _check_balance(split)


def _check_balance(split: VerifiedSplit) -> Check:
    index = split.index
    counts = index.samples_per_class()
    low, high = int(counts.min()), int(counts.max())
    text = f"{low:,} to {high:,} images a class, median {np.median(counts):,.0f}"
    rare = np.flatnonzero(counts * _UNEVEN < high)
    findings = (
        Finding("verify.rare-class", f"class {index.classes[row]!r} has {counts[row]:,} images")
        for row in rare.tolist()
    )
    return checked(split.name, "balance", text, findings, count=len(rare), otherwise="note")


def _check_lost(split: VerifiedSplit) -> Iterator[Check]:
    """What some images hold and training does not see."""
    found = lost.remarks(split.index)
    findings = [Finding(f"verify.{code}", text) for code, text in found]
    if depth := lost.measured(split.index):
        code = "verify.channels" if depth.channels else "verify.deep"
        findings.append(Finding(code, f"{depth}: training takes them by {depth.options()}"))
    result: Result = "problem" if any(code == "dark" for code, _ in found) else "note"
    if findings:
        yield checked(split.name, "pixels", "by a few images", findings, otherwise=result)


def _check_classes(splits: Sequence[VerifiedSplit]) -> Iterator[Check]:
    """Checks that there is something to learn, and that splits agree in what classes mean."""
    if not splits or splits[0].name == "val":
        return
    first, others = splits[0], splits[1:]
    text = f"{np.count_nonzero(first.index.samples_per_class()):,} with images"
    try:
        check_learnable(first.index, first.index.root)
    except DataError as error:
        yield checked(first.name, "classes", text, [of_error(error)])
    else:
        notes = [] if others else _remarked(class_remarks(first.index, None))
        yield checked(first.name, "classes", text, notes, otherwise="note")
    for other in others:
        known, other_index, both = first.index, other.index, f"{first.name}, {other.name}"
        text = f"{len(known.classes):,} and {len(other_index.classes):,}"
        try:
            match = match_classes(
                known.classes, other_index.classes, other.name, has_names=other_index.has_names
            )
        except DataError as error:
            yield checked(both, "classes", text, [of_error(error)])
            continue
        remarks = class_remarks(known, other_index, match.numbers)
        notes = _remarked([match.remark, *remarks] if match.remark else remarks)
        yield checked(both, "classes", text, notes, otherwise="note")


def _remarked(remarks: list[str]) -> list[Finding]:
    return [Finding("verify.classes", remark) for remark in remarks]


def _check_overlap(splits: Sequence[VerifiedSplit]) -> Iterator[Check]:
    """Checks the first split against the others: equal positions in files.

    An overlap is a problem, since validation images that are trained on falsify the accuracy.
    """
    for other in splits[1:]:
        first, both = splits[0], f"{splits[0].name}, {other.name}"
        rows = same_samples(first.index, other.index)
        findings = (
            other.finding(row, "verify.overlap", f"is in {first.name} too") for row in rows.tolist()
        )
        yield checked(both, "overlap", "by file names", findings, count=len(rows))


# --- checks of the images ---


def _check_images(split: VerifiedSplit, images: ImageFindings) -> Iterator[Check]:
    readable = len(split.index) - images.bad.count
    findings = (split.finding(*row) for row in images.bad.first)
    text = f"{readable:,} of {len(split.index):,} decode"
    yield checked(split.name, "images", text, findings, count=images.bad.count)
    kinds = sorted(images.kinds.items(), key=lambda item: -item[1].count)
    text = ", ".join(f"{tally.count:,} {kind}" for kind, tally in kinds)
    count, rows = images.odd.count, [*images.odd.first]
    for kind in _rare_types(images):
        count += images.kinds[kind].count
        what = f"a {kind} among {kinds[0][0]}"
        rows += [(sample, "verify.rare-type", what) for sample in images.kinds[kind].first]
    findings = (split.finding(*row) for row in sorted(rows))
    yield checked(split.name, "oddities", text, findings, count=count, otherwise="note")
    count = images.turned.count
    findings = (split.finding(*row) for row in images.turned.first)
    text = "EXIF other than 1: data.exif = true turns them" if count else "all upright"
    yield checked(split.name, "orientation", text, findings, count=count, otherwise="note")


def _rare_types(images: ImageFindings) -> list[str]:
    """The kinds of file types that hardly any image has."""
    types: Counter[str] = Counter()
    for kind, tally in images.kinds.items():
        types[kind.split()[0]] += tally.count
    return [kind for kind in images.kinds if types[kind.split()[0]] < _RARE * types.total()]


def _check_duplicates(splits: Sequence[VerifiedSplit], hashes: Hashes) -> Iterator[Check]:
    """Finds equal bytes: a note within one split, a problem across splits.

    A duplicate in training data only counts twice; a validation image that is trained on falsifies
    the accuracy.
    """
    starts = np.cumsum([0, *(len(split.index) for split in splits)])
    rows, firsts = same_bytes(hashes)
    of_row = np.searchsorted(starts, rows, side="right") - 1
    of_first = np.searchsorted(starts, firsts, side="right") - 1

    def finding(pair: int) -> Finding:
        split: VerifiedSplit = splits[of_row[pair]]
        other = splits[of_first[pair]]
        sample = int(rows[pair] - starts[of_row[pair]])
        original = int(firsts[pair] - starts[of_first[pair]])
        file, offset, _ = other.index.locate(original)
        span = f"{file}, byte {offset}" if offset else file
        ours, theirs = split.index.class_names(sample), other.index.class_names(original)
        names = f"{', '.join(map(repr, ours))} instead of {', '.join(map(repr, theirs))}"
        classes = f", but of class {names}" if ours != theirs else ""
        return split.finding(sample, "verify.same-bytes", f"the same bytes as {span}{classes}")

    def check(data: str, name: str, is_such: Bools, otherwise: Result) -> Check:
        which = np.flatnonzero(is_such)
        findings = map(finding, which.tolist())
        return checked(data, name, "by content", findings, count=len(which), otherwise=otherwise)

    for number, split in enumerate(splits):
        is_same = (of_row == number) & (of_first == number) & (rows != firsts)
        yield check(split.name, "duplicates", is_same, "note")
    for number, split in enumerate(splits[1:], 1):
        is_across = (of_row == number) & (of_first < number)
        yield check(f"{splits[0].name}, {split.name}", "leakage", is_across, "problem")
