"""Uploads an export to the Hugging Face Hub, in one commit: hf://OWNER/NAME[@REVISION].

As in huggingface_hub, HF_ENDPOINT names another server, and the token is HF_TOKEN's or that of
`hf auth login`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainyard.data.storage.credentials import hub_endpoint
from trainyard.errors import InputError, TrainyardError

_NAME = re.compile(
    r"hf://(?!datasets/|spaces/)(?P<id>[^/@\s]+/[^/@\s]+)(?:@(?P<revision>[^@\s]+))?"
)
_ROLE = "it needs the role write, and OWNER must be its account or an organisation of that"
_NOTHING_DONE = "nothing was exported"


class Repository:
    """A repository of models on the Hub, which need not be there yet."""

    def __init__(self, name: str) -> None:
        """InputError if `name` is no hf://OWNER/NAME[@REVISION], or if there is no token."""
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        found = _NAME.fullmatch(name)
        if found is None:
            raise InputError(f"--push {name}: write hf://OWNER/NAME, or hf://OWNER/NAME@REVISION")
        self.name, self.id, self._revision = name, found["id"], found["revision"]
        try:
            validate_repo_id(self.id)
        except HFValidationError as error:
            raise InputError(f"--push {name}: {error}") from None
        token = get_token()
        if token is None:
            raise InputError(f"--push {name}: no token: set HF_TOKEN, or run `hf auth login`")
        if not (token.isascii() and token.isprintable()):  # an error would quote it
            raise InputError(f"--push {name}: the token has a character that tokens cannot have")
        self._api = HfApi(hub_endpoint(), token=token)

    @property
    def timm_name(self) -> str:
        """The name by which timm.create_model loads what is in the repository."""
        return self.name.replace("hf://", "hf-hub:")

    def check(self) -> None:
        """InputError if the Hub refuses the token, TrainyardError if it cannot be reached."""
        with self._one_line_errors(_NOTHING_DONE):
            self._api.whoami()

    def push(self, files: Mapping[str, Path], message: str, *, private: bool) -> str:
        """Commit files under their names; returns the URL of the commit.

        Creates the repository, private or public, and the branch if they are absent. InputError if
        this is not allowed, TrainyardError if the upload fails; then nothing was committed.
        """
        from huggingface_hub import CommitOperationAdd

        with self._one_line_errors("nothing was committed"), _without_bars():
            self._api.create_repo(self.id, private=private or None, exist_ok=True)
            if private and not self._api.model_info(self.id).private:
                raise InputError(f"--private: {self.id} is there already, and public")
            if self._revision is not None and not self._revision.startswith("refs/"):
                self._api.create_branch(self.id, branch=self._revision, exist_ok=True)
            commit = self._api.create_commit(
                self.id,
                [CommitOperationAdd(name, path) for name, path in files.items()],
                commit_message=message,
                revision=self._revision,
            )
        return str(commit.commit_url)

    @contextmanager
    def _one_line_errors(self, outcome: str) -> Iterator[None]:
        """Errors of huggingface_hub and of the network libraries below it, as Trainyard's."""
        try:
            yield
        except TrainyardError:
            raise
        except Exception as error:
            raise self._told(error, outcome) from error

    def _told(self, error: BaseException, outcome: str) -> TrainyardError:
        while not hasattr(error, "response") and error.__cause__ is not None:
            error = error.__cause__  # an upload's error wraps the one that says why
        start, status = f"--push {self.name}:", _status(error)
        if status == 401 and outcome == _NOTHING_DONE:
            return InputError(
                f"{start} the Hub refuses the token: set a valid HF_TOKEN, which comes first, or "
                "run `hf auth login`"
            )
        if type(error).__name__ == "RevisionNotFoundError":
            return InputError(f"{start} there is no revision {self._revision}; {outcome}")
        if status in (401, 403, 404):
            return InputError(f"{start} the token may not write to {self.id}: {_ROLE}; {outcome}")
        return TrainyardError(f"{start} {self._api.endpoint}: {_reason(error)}; {outcome}")


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without the bars of huggingface_hub, as the command shows its own progress."""
    from huggingface_hub import utils

    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _status(error: BaseException) -> int | None:
    """The status of the response that an error is about."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _reason(error: BaseException) -> str:
    """The first line of an error, or what the server says."""
    text = getattr(error, "server_message", None) or str(error)
    return next((line for line in text.splitlines() if line.strip()), type(error).__name__)
