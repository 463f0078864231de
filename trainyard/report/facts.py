"""Sections on events, unreadable images, environment and recipe of a run."""

import json
from collections.abc import Sequence
from typing import Any

from trainyard.compare import PRACTICAL
from trainyard.data.storage.credentials import without_secrets
from trainyard.report.groups import Group, differences
from trainyard.report.markup import Child, Html, join, table, tag
from trainyard.report.runs import Run, counted, number
from trainyard.report.ticks import clock

_ROWS = 200  # most rows of events and of unreadable images


def events_section(runs: Sequence[Run]) -> Html:
    """The latest events in order of time, and the number of skipped updates."""
    rows: list[list[Child]] = []
    for run in runs:
        for event in run.history.events:
            seconds = number(event, "time")
            row: list[Child] = [
                f"{event['step']:,}",
                "" if seconds is None else clock(seconds),
                _kind(event),
                without_secrets(str(event.get("message", ""))),
            ]
            rows.append(row if len(runs) == 1 else [*row[:3], run.name, row[3]])
    skipped = sum(number(report, "skipped") or 0 for run in runs for report in run.history.train)
    about = f"{skipped:g} updates skipped because a gradient was not finite." if skipped else ""
    if not rows:
        return tag("p", about or "Nothing out of the ordinary.", class_="about")
    head = ["Step", "Time", "Event", *(["Run"] if len(runs) > 1 else []), "What"]
    caption = _caption("event", len(rows))
    return join(
        tag("p", about, class_="about") if about else None,
        table(head, rows[-_ROWS:], caption=caption, class_="events"),
    )


def _kind(event: dict[str, Any]) -> Html:
    is_warning = event.get("level") == "warning"
    return tag(
        "span", str(event.get("event", "")), class_="badge warning" if is_warning else "badge"
    )


def _caption(what: str, count: int) -> str:
    if count <= _ROWS:
        return f"{count:,} {what}{'' if count == 1 else 's'}"
    return f"The last {_ROWS} of {count:,} {what}s"


def quarantine_section(runs: Sequence[Run]) -> Html:
    rows: list[list[Child]] = []
    for run in runs:
        for bad in run.quarantine:
            file, offset = without_secrets(str(bad.get("file", ""))), bad.get("offset", "")
            text = f"{offset:,}" if isinstance(offset, int) else str(offset)
            row: list[Child] = [file, text, str(bad.get("reason", "")), str(bad.get("split", ""))]
            rows.append(row if len(runs) == 1 else [*row, run.name])
    if not rows:
        return tag("p", "Every image could be read.", class_="about")
    head = ["File", "Offset", "Reason", "Split", *(["Run"] if len(runs) > 1 else [])]
    return table(head, rows[-_ROWS:], caption=_caption("image", len(rows)))


def environment_section(runs: Sequence[Run]) -> Html:
    """A table with a column for each run."""
    found = [_environment(run) for run in runs]
    keys = list(dict.fromkeys(key for rows in found for key in rows))
    if not keys:
        return tag("p", "There is no environment.json in the run directory.", class_="about")
    rows: list[list[Child]] = [[key, *(of.get(key, "") for of in found)] for key in keys]
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else ["", "Value"]
    return table(head, rows, caption="What the first rank ran on", class_="facts")


def _environment(run: Run) -> dict[str, str]:
    tree = run.environment
    rows = {
        "Host": tree.get("host"),
        "Devices": counted(tree.get("devices") or []),
        "CPU cores": tree.get("cpus"),
        "Python": tree.get("python"),
        "Versions": ", ".join(
            f"{key} {of}" for key, of in (tree.get("versions") or {}).items() if of
        ),
        "Commit": _commit(tree.get("git")),
        "Command": without_secrets(" ".join(map(str, tree.get("command") or []))),
        **{
            f"Fingerprint of {split}": str(of)[:16]
            for split, of in (tree.get("fingerprints") or {}).items()
        },
    }
    return {key: str(value) for key, value in rows.items() if value not in (None, "")}


def _commit(git: dict[str, Any] | None) -> str | None:
    if not git:
        return None
    return f"{str(git.get('commit'))[:12]}{', altered' if git.get('altered') else ''}"


def recipe_section(groups: Sequence[Group]) -> Html:
    """The whole recipe of each group's first run."""
    parts: list[Html | None] = []
    for group in groups:
        text = without_secrets(group.runs[0].recipe_text)
        name = f"Recipe of {group.name}"
        body = tag("pre", text, tabindex=0, role="region", aria_label=name)
        summary = tag("summary", "recipe.toml" if len(groups) == 1 else name)
        parts.append(tag("details", summary, body, id=f"recipe-{len(parts)}") if text else None)
    return join(*parts) if any(parts) else tag("p", "There is no recipe.toml.", class_="about")


def differences_section(runs: Sequence[Run]) -> Html:
    """A row for each recipe key that differs between runs; practical keys come last."""
    found = sorted(differences(runs), key=lambda row: row[0] in PRACTICAL)
    if not found:
        return tag("p", "The recipes are the same.", class_="about")
    rows: list[list[Child]] = [
        [tag("code", key), *(without_secrets(_text(value)) for value in values)]
        for key, values in found
    ]
    return table(["Key", *(run.name for run in runs)], rows, caption="Keys that differ")


def _text(value: Any) -> str:
    if value is None:
        return "\N{EM DASH}"
    return value if isinstance(value, str) else json.dumps(value)
