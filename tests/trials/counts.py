"""How many trials are made: few by default, to show that they work; many to find something out.

    TRIAL_FLIPS=80 TRIAL_SIGNALS=60 TRIAL_FUZZ=200000 \\
        python -m pytest tests/trials -s --timeout 0

TRIAL_SEED chooses other moments, bits and damage. Each trial prints what came of it.
"""

import os

SEED = int(os.environ.get("TRIAL_SEED", "0"))


def count_of(name: str, few: int) -> int:
    """How many trials of a kind: $TRIAL_NAME, or `few`."""
    return int(os.environ.get(f"TRIAL_{name}", few))
