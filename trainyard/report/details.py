"""The folded parts of a page: settings, remarks, events, unreadable images, environment."""

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


def folded_section(groups: Sequence[Group]) -> Html:
    """What is seldom looked at, each part folded, with its number of entries."""
    runs = [run for group in groups for run in group.runs]
    events, events_text = _events(runs)
    parts = [
        *([("settings", "Settings at the start", _settings(runs[0]))] if len(runs) == 1 else []),
        *_recipes(groups),
        ("remarks", *_remarks(runs)),
        ("events", events, events_text),
        ("quarantine", *_quarantine(runs)),
        ("environment", "Hardware and versions", _environments(runs)),
    ]
    return join(
        *(tag("details", tag("summary", title), content, id=name) for name, title, content in parts)
    )


def _settings(run: Run) -> Html:
    """The head that the run printed when it was started last."""
    heads = [event["rows"] for event in run.history.events if isinstance(event.get("rows"), dict)]
    if not heads:
        return about("The run printed none.")
    rows: list[list[Child]] = [[name, without_secrets(str(of))] for name, of in heads[-1].items()]
    return table(["", "Value"], rows, caption="The run at its start", class_="facts")


def _remarks(runs: Sequence[Run]) -> tuple[str, Html]:
    """Each remark once, with the names of those of several runs that have it."""
    names: dict[str, dict[str, None]] = {}
    for run in runs:
        for event in run.history.events:
            if event.get("event") == "remark":
                text = without_secrets(str(event.get("message", "")))
                names.setdefault(text, {})[run.name] = None
    notes = []
    for text, of in names.items():
        which = (
            "" if len(runs) == 1 else "all runs: " if len(of) == len(runs) else f"{', '.join(of)}: "
        )
        notes.append(tag("p", f"{which}{text}", class_="note"))
    return f"Remarks: {len(notes) or 'none'}", join(*notes)


def _events(runs: Sequence[Run]) -> tuple[str, Html]:
    """The latest events, and the number of skipped updates."""
    rows = {
        run.name: [
            _event(event)
            for event in run.history.events
            if event.get("event") not in ("head", "remark")
        ]
        for run in runs
    }
    skipped = sum(number(report, "skipped") or 0 for run in runs for report in run.history.train)
    updates = "update was" if skipped == 1 else "updates were"
    text = f"{skipped:g} {updates} skipped: a gradient was not finite." if skipped else ""
    title = f"Events: {sum(map(len, rows.values())) or 'none'}"
    head = ["Step", "Time", "Event", "What"]
    latest = _latest("event", head, rows, class_="events") if any(rows.values()) else None
    return title, join(about(text) if text else None, latest)


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


def _quarantine(runs: Sequence[Run]) -> tuple[str, Html]:
    """The latest images that could not be read."""
    keys = ("file", "offset", "reason", "split")
    rows = {
        run.name: [
            tuple(without_secrets(str(bad.get(key, ""))) for key in keys) for bad in run.quarantine
        ]
        for run in runs
    }
    count = sum(map(len, rows.values()))
    if not count:
        return "Unreadable images: none", about("Every image could be read.")
    head = ["File", "Offset", "Reason", "Split"]
    return f"Unreadable images: {count:,}", _latest("image", head, rows)


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


def _environments(runs: Sequence[Run]) -> Html:
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


def _recipes(groups: Sequence[Group]) -> list[tuple[str, str, Html]]:
    """The whole recipe of each group's first run."""
    parts: list[tuple[str, str, Html]] = []
    for group in groups:
        name = "recipe.toml" if len(groups) == 1 else f"Recipe of {group.name}"
        text = without_secrets(group.runs[0].recipe_text)
        body = tag("pre", text, tabindex=0, role="region", aria_label=name)
        if text:
            parts.append((f"recipe-{len(parts)}", name, body))
    return parts


def differences_section(runs: Sequence[Run]) -> Html:
    """A row for each recipe key that differs between runs; practical keys come last."""
    differing = sorted(differences(runs), key=lambda row: row[0] in PRACTICAL)
    if not differing:
        return about("The recipes are the same.")
    rows: list[list[Child]] = [[tag("code", key), *map(_text, values)] for key, values in differing]
    return table(["Key", *(run.name for run in runs)], rows, caption="Keys that differ")


def _text(value: Any) -> str:
    return "\N{EM DASH}" if value is None else without_secrets(as_text(value))
