"""Problems of a host in one line that says what to do."""

import re
from collections.abc import Sequence

NO_FOLDER, NO_PYTHON = 81, 82
"""Exit codes of the script that starts the agent."""
_SSH_FAILED = 255
_LOGIN = (
    ("Permission denied", "login refused: your public key is not in its authorized_keys"),
    (
        "Could not resolve hostname",
        "unknown host: no name service nor ssh config knows it",
    ),
    (
        "Host key verification failed",
        "its host key is not known here: log in by hand once",
    ),
    ("Connection refused", "nothing listens at its ssh port"),
    ("timed out|not responding|No route|unreachable", "it does not answer"),
)
_NO_MODULE = re.compile(r"No module named '?trainyard|Error while finding module.*trainyard")


def why_not(code: int, said: Sequence[str], *, folder: str, python: str) -> str:
    """The reason why no agent runs there, from ssh's exit code and stderr lines."""
    last = said[-1].strip() if said else ""
    if code == NO_FOLDER:
        return f"there is no directory {folder} there: name it by --folder, or copy this by --sync"
    if code == NO_PYTHON:
        return f"there is no {python} there: name its Python by --python"
    if code == _SSH_FAILED:
        known = (text for words, text in _LOGIN if re.search(words, " ".join(said)))
        return f"{next(known, 'ssh failed')} ({last or 'ssh says nothing'})"
    if _NO_MODULE.search(" ".join(said)):
        return f"{python} there has no such trainyard: install it, or name another Python"
    return f"{python} there ended with exit code {code}: {last or 'it says nothing'}"


def why_gone(code: int, said: Sequence[str]) -> str:
    """The reason why an established connection ended."""
    last = said[-1].strip() if said else "connection closed"
    if code == _SSH_FAILED:
        return last
    return f"its agent ended with exit code {code} ({last})"
