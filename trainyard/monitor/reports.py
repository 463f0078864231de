"""The record that every part of a run reports in."""

from typing import Any

Report = dict[str, Any]
"""One line of metrics.jsonl: plain JSON, with `kind`, `step`, `epoch`, `samples` and `time`."""
