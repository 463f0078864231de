"""Tables of others' flags beside ours: ours exist and accept the given values."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import (
    DOCS,
    check_mention,
    name_of,
    options_of_training,
    rows_beside_ours,
)
from trainyard.config import all_keys, check
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.erasing import RandomErasing
from trainyard.data.augment.mixing import Mixing
from trainyard.data.augment.transforms import batch_transforms
from trainyard.optim.config import NAMES, OptimConfig

PAGES = sorted((DOCS / "come-from").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_we_have_beside_it_exists(page: Path) -> None:
    rows = list(rows_beside_ours(page))
    assert len(rows) > 10
    for theirs, ours in rows:
        check_ours(theirs, ours)


def check_ours(theirs: str, ours: str) -> None:
    tree: dict[str, dict[str, object]] = {}
    for code in re.findall(r"`([^`]+)`", ours):
        if code.startswith("trainyard "):
            check_mention(code)
        elif code.startswith("--"):
            assert code.split()[0] in options_of_training(), f"{theirs}: {code}"
        else:
            key, _, value = code.partition(" = ")
            assert key in all_keys(), f"{theirs}: {key}"
            section, name = key.split(".")
            if value:
                tree.setdefault(section, {})[name] = tomllib.loads(f"value = {value}")["value"]
    # Beside what they need: an optimizer that takes its keys, erasing, and a warm-up.
    optim = tree.get("optim", {})
    taker = next(name for name in NAMES if not OptimConfig.keys_of_others(name) & optim.keys())
    tree["optim"] = {"name": taker} | optim
    tree["augment"] = {"erasing": 0.5} | tree.get("augment", {})
    tree["schedule"] = {"warmup": "1 epoch"} | tree.get("schedule", {})
    check(tree)


@pytest.mark.parametrize(
    ("page", "theirs", "ours"),
    [
        # torchvision's preset erases with its default, 0; ours is noise.
        ("torchvision", "`--random-erase`", '`augment.erasing_mode = "const"`'),
        # In timm 1, drop_rate is another dropout than in the timm of the source.
        ("large-batch-vit", "`DROP_RATE`", "{pos_drop_rate = 0.1, proj_drop_rate = 0.1}"),
        ("convnext-cluster", "`--layer_decay`", "`optim.lr_scale`"),
        ("timm", "`--warmup-prefix`", "`schedule.warmup_prefix = true`"),
    ],
)
def test_a_default_that_differs_is_named(page: str, theirs: str, ours: str) -> None:
    assert ours in dict(rows_beside_ours(DOCS / "come-from" / f"{page}.md"))[theirs]


def test_erasing_comes_before_mixing_and_the_page_for_timm_s_users_says_so() -> None:
    """timm's train.py mixes first; the page gave its flags without a remark."""
    found = batch_transforms(AugmentConfig(erasing=0.25, mixup=0.8), seed=0)
    assert [type(transform) for transform in found] == [RandomErasing, Mixing]
    assert "before mixing here, after it there" in (DOCS / "come-from" / "timm.md").read_text()


def test_a_wrong_key_option_or_value_is_seen() -> None:
    for wrong in ("`optim.rate`", "`--machines`", "`trainyard tain`"):
        with pytest.raises(AssertionError):
            check_ours("theirs", wrong)
    with pytest.raises(Exception, match=r"optim\.name"):
        check_ours("theirs", '`optim.name = "adamaxx"`')


def test_there_is_a_page_for_each() -> None:
    assert {page.stem for page in PAGES} == {
        *("convnext-cluster", "webdataset", "decentralized", "large-batch-vit"),
        *("timm", "torchvision"),
    }
