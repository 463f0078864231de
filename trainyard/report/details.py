"""Sections on events, unreadable images, environment and recipes of runs."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainyard.compare import PRACTICAL
from trainyard.data.storage.credentials import without_secrets
from trainyard.monitor.history import number
from trainyard.printable import as_text, duration, how_many
from trainyard.report.markup import Child, Html, about, join, table, tag
from trainyard.report.runs import Group, Run, counted, differences

_ROWS = 200  # of events, and of unreadable images, shared among the runs


def events_section(runs: Sequence[Run]) -> Html:
    """The latest events, and the number of skipped updates; heads are in the overview."""
    rows = {
        run.name: [_event(event) for event in run.history.events if event.get("event") != "head"]
        for run in runs
    }
    skipped = sum(number(report, "skipped") or 0 for run in runs for report in run.history.train)
    updates = "update was" if skipped == 1 else "updates were"
    text = f"{skipped:g} {updates} skipped: a gradient was not finite." if skipped else ""
    if not any(rows.values()):
        return about(text or "Nothing out of the ordinary.")
    head = ["Step", "Time", "Event", "What"]
    return join(about(text) if text else None, _latest("event", head, rows, class_="events"))


def _event(event: dict[str, Any]) -> tuple[Child, ...]:
    seconds = number(event, "time")
    return (
        f"{event['step']:,}",
        "" if seconds is None else duration(seconds),
        tag(
            "span",
            str(event.get("event", "")),
            class_="badge warning" if event.get("level") == "warning" else "badge",
        ),
        without_secrets(str(event.get("message", ""))),
    )


def quarantine_section(runs: Sequence[Run]) -> Html:
    """The latest images that could not be read."""
    keys = ("file", "offset", "reason", "split")
    rows = {
        run.name: [
            tuple(without_secrets(str(bad.get(key, ""))) for key in keys) for bad in run.quarantine
        ]
        for run in runs
    }
    if not any(rows.values()):
        return about("Every image could be read.")
    return _latest("image", ["File", "Offset", "Reason", "Split"], rows)


def _latest(
    what: str,
    head: list[str],
    rows: Mapping[str, Sequence[tuple[Child, ...]]],
    *,
    class_: str | None = None,
) -> Html:
    """A table of the last rows of each run; a single run has no column of names."""
    count, share = sum(map(len, rows.values())), max(_ROWS // len(rows), 1)
    caption = how_many(count, what)
    if any(len(of_run) > share for of_run in rows.values()):
        each = " of each run" if len(rows) > 1 else ""
        caption = f"The last {share}{each}, of {caption}"
    shown: list[list[Child]] = [
        [*([name] if len(rows) > 1 else []), *row]
        for name, of_run in rows.items()
        for row in of_run[-share:]
    ]
    head = head if len(rows) == 1 else ["Run", *head]
    return table(head, shown, caption=caption, class_=class_)


def environment_section(runs: Sequence[Run]) -> Html:
    """A table with a column for each run."""
    columns = [_environment(run.environment) for run in runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    if not keys:
        return about("There is no environment.json in the run directory.")
    rows: list[list[Child]] = [[key, *(column.get(key, "") for column in columns)] for key in keys]
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else ["", "Value"]
    return table(head, rows, caption="Environment of the first rank", class_="facts")


def _environment(tree: dict[str, Any]) -> dict[str, str]:
    versions = (tree.get("versions") or {}).items()
    git = tree.get("git") or {}
    rows = {
        "Host": tree.get("host"),
        "Devices": counted(tree.get("devices") or []),
        "CPU cores": tree.get("cpus"),
        "Python": tree.get("python"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions if version),
        "Commit": f"{str(git.get('commit'))[:12]}{', altered' if git.get('altered') else ''}"
        if git
        else None,
        "Command": without_secrets(shlex.join(map(str, tree.get("command") or []))),
        **{
            f"Fingerprint of {split}": str(fingerprint)[:16]
            for split, fingerprint in (tree.get("fingerprints") or {}).items()
        },
    }
    return {key: str(value) for key, value in rows.items() if value not in (None, "")}


def recipe_section(groups: Sequence[Group]) -> Html:
    """The whole recipe of each group's first run."""
    parts: list[Html] = []
    for group in groups:
        name = "recipe.toml" if len(groups) == 1 else f"Recipe of {group.name}"
        text = without_secrets(group.runs[0].recipe_text)
        body = tag("pre", text, tabindex=0, role="region", aria_label=name)
        if text:
            parts.append(tag("details", tag("summary", name), body, id=f"recipe-{len(parts)}"))
    return join(*parts) if parts else about("There is no recipe.toml.")


def differences_section(runs: Sequence[Run]) -> Html:
    """A row for each recipe key that differs between runs; practical keys come last."""
    differing = sorted(differences(runs), key=lambda row: row[0] in PRACTICAL)
    if not differing:
        return about("The recipes are the same.")
    rows: list[list[Child]] = [[tag("code", key), *map(_text, values)] for key, values in differing]
    return table(["Key", *(run.name for run in runs)], rows, caption="Keys that differ")


def _text(value: Any) -> str:
    return "\N{EM DASH}" if value is None else without_secrets(as_text(value))
