"""The text of a fold, "2/5". By itself, as a recipe is read without what an index needs."""

import re


def read_fold(text: str) -> tuple[int, int]:
    """(2, 5) for "2/5". ValueError for another text, or a number above that of the folds."""
    match = re.fullmatch("([1-9][0-9]{0,4})/([1-9][0-9]{0,4})", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not number <= count >= 2:
        raise ValueError("expected K/N, the K-th of N folds, such as 2/5")
    return number, count
