"""What peers that bring no folder reader are given: the paths of all images, and their classes."""

from pathlib import Path


def listed(folder: Path) -> list[tuple[str, int]]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [(str(path), n) for n, place in enumerate(classes) for path in sorted(place.iterdir())]
