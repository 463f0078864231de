"""Mistakes of the model, with pictures: confused classes and the worst errors."""

import numpy as np

from trainyard.report.classes import name_of
from trainyard.report.frame import switch
from trainyard.report.markup import Html, join, tag
from trainyard.report.pictures import Album
from trainyard.report.runs import Run
from trainyard.training.predictions import confusions
from trainyard.training.recorded import Recorded

_PAIRS, _EXAMPLES = 12, 4
_WORST = 24  # highest losses shown, and as many of the highest confidences


def confusions_section(run: Run, album: Album) -> Html | None:
    recorded = run.recorded
    if recorded is None:
        return None
    pairs = confusions(recorded.said, recorded.labels, _PAIRS)
    if not pairs:
        return tag("p", "No image is taken for another class.", class_="about")
    totals = np.bincount(recorded.labels[recorded.said.is_read()])
    examples = [_examples(recorded, pair.label, pair.guess) for pair in pairs]
    album.load(sample for found in examples for sample in found)
    rows = []
    for pair, samples in zip(pairs, examples, strict=True):
        label, guess = name_of(run, pair.label), name_of(run, pair.guess)
        share = f"{pair.samples:,} of {totals[pair.label]:,} images"
        text = [
            tag("p", tag("b", label), " taken for ", tag("b", guess), class_="pair-names"),
            tag("p", f"{share}, {pair.samples / totals[pair.label]:.0%}", class_="detail"),
        ]
        alt = f"{label}, taken for {guess}"
        pictures = [_picture(album, sample, alt) for sample in samples]
        shown = [picture for picture in pictures if picture]
        rows.append(
            tag("li", tag("div", *text), tag("div", *shown, class_="strip") if shown else None)
        )
    return tag("ul", *rows, class_="pairs")


def _examples(recorded: Recorded, label: int, guess: int) -> list[int]:
    """The most confident errors of a pair of classes."""
    said = recorded.said
    found = np.flatnonzero((recorded.labels == label) & (said.guess == guess) & said.is_read())
    return [int(n) for n in found[np.argsort(-said.confidence[found], kind="stable")][:_EXAMPLES]]


def errors_section(run: Run, album: Album) -> Html | None:
    recorded = run.recorded
    if recorded is None:
        return None
    said = recorded.said
    wrong = np.flatnonzero(said.is_read() & (said.place > 1) & (said.guess >= 0))
    if not len(wrong):
        return tag("p", "Every validation image is recognised.", class_="about")
    by_loss = wrong[np.argsort(-said.loss[wrong], kind="stable")]
    by_confidence = wrong[np.argsort(-said.confidence[wrong], kind="stable")]
    chosen = dict.fromkeys([*by_loss[:_WORST].tolist(), *by_confidence[:_WORST].tolist()])
    samples = sorted(chosen, key=lambda sample: -float(said.loss[sample]))
    album.load(samples)
    about = (
        f"{len(wrong):,} of {int(said.is_read().sum()):,} validation images are taken for another "
        f"class. Shown are the {len(samples)} with the highest loss or the most confident guess."
    )
    tiles = [_tile(run, recorded, album, sample) for sample in samples]
    order = switch("order", "Order by", {"loss": "Loss", "confidence": "Confidence"})
    grid = tag("ul", *tiles, class_="tiles", id="errors-grid")
    return join(tag("p", about, class_="about"), order, grid)


def _tile(run: Run, recorded: Recorded, album: Album, sample: int) -> Html:
    said = recorded.said
    label = name_of(run, int(recorded.labels[sample]))
    guess = name_of(run, int(said.guess[sample]))
    confidence, loss = float(said.confidence[sample]), float(said.loss[sample])
    picture = _picture(album, sample, f"{label}, taken for {guess}")
    is_none = tag("span", "no picture", class_="no-picture")
    where = f"#{sample} {album.file(sample)}".strip()
    return tag(
        "li",
        tag("div", picture or is_none, class_="picture"),
        tag("p", tag("span", "is ", class_="detail"), tag("b", label)),
        tag("p", tag("span", "taken for ", class_="detail"), tag("b", guess, class_="wrong")),
        tag("p", f"{confidence:.0%} sure, loss {loss:.2f}", class_="detail"),
        tag("p", where, class_="detail file", title=where),
        data_loss=f"{loss:.4g}",
        data_confidence=f"{confidence:.4g}",
    )


def _picture(album: Album, sample: int, alt: str) -> Html | None:
    uri = album.uri(sample)
    if uri is None:
        return None
    small = "small" if uri.startswith("data:image/png") else None
    return tag("img", src=uri, alt=alt, class_=small)
