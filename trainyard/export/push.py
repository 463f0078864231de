"""Uploads an export to the Hugging Face Hub: hf://OWNER/NAME[@REVISION].

As in huggingface_hub, HF_ENDPOINT names another server, and the token is HF_TOKEN's or that of
`hf auth login`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import HFValidationError, disable_progress_bars, validate_repo_id

from trainyard.data.storage.credentials import hub_endpoint
from trainyard.errors import InputError, TrainyardError

_NAME = re.compile(
    r"hf://(?!datasets/|spaces/)(?P<id>[^/@\s]+/[^/@\s]+)(?:@(?P<revision>[^@\s]+))?"
)


class Repository:
    """A repository of models on the Hub, which need not be there yet."""

    def __init__(self, name: str) -> None:
        """InputError if `name` is no hf://OWNER/NAME[@REVISION], or if there is no token."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise InputError(
                "export.malformed-push-name",
                "--push {name}: write hf://OWNER/NAME, or hf://OWNER/NAME@REVISION",
                name=name,
            )
        self.name, self._id, self._revision = name, found["id"], found["revision"]
        try:
            validate_repo_id(self._id)
        except HFValidationError as error:
            raise InputError(
                "export.invalid-repository-name",
                "--push {name}: {reason}",
                name=name,
                reason=str(error),
            ) from None
        token = get_token()
        if token is None:
            raise InputError(
                "export.no-token",
                "--push {name}: no token: set HF_TOKEN, or run `hf auth login`",
                name=name,
            )
        if not (token.isascii() and token.isprintable()):  # an error would quote it
            raise InputError(
                "export.malformed-token",
                "--push {name}: the token has a character that tokens cannot have",
                name=name,
            )
        self._api = HfApi(hub_endpoint(), token=token)

    @property
    def timm_name(self) -> str:
        """The name by which timm.create_model loads what is in the repository."""
        return self.name.replace("hf://", "hf-hub:")

    def check(self) -> None:
        """InputError if the Hub refuses the token, TrainyardError if it cannot be reached."""
        with self._one_line_errors("nothing was exported"):
            self._api.whoami()

    def push(self, folder: Path, message: str, *, private: bool) -> str:
        """Upload the files of a folder; returns the URL of the commit.

        Creates the repository, private or public, and the branch if they are absent. InputError if
        this is not allowed, TrainyardError if the upload fails.
        """
        disable_progress_bars()  # the command shows its own progress
        with self._one_line_errors("the upload is not complete"):
            self._api.create_repo(self._id, private=private or None, exist_ok=True)
            if private and not self._api.model_info(self._id).private:
                raise InputError(
                    "export.repository-public",
                    "--private: {name} is there already, and public",
                    name=self._id,
                )
            if self._revision is not None and not self._revision.startswith("refs/"):
                self._api.create_branch(self._id, branch=self._revision, exist_ok=True)
            commit = self._api.upload_folder(
                repo_id=self._id,
                folder_path=folder,
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
            cause: BaseException = error
            while not hasattr(cause, "response") and cause.__cause__ is not None:
                cause = cause.__cause__  # an upload's error wraps the one with the reason
            text = getattr(cause, "server_message", None) or str(cause)
            reason = next(filter(str.strip, text.splitlines()), type(cause).__name__)
            name, address = self.name, self._api.endpoint
            if getattr(getattr(cause, "response", None), "status_code", 0) in (401, 403, 404):
                raise InputError(
                    "export.token-refused",
                    "--push {name}: {address}: {reason}; {outcome}: the token (HF_TOKEN, else "
                    "that of `hf auth login`) needs the role write, and OWNER must be its account "
                    "or an organisation of that",
                    name=name,
                    address=address,
                    reason=reason,
                    outcome=outcome,
                ) from error
            raise TrainyardError(
                "export.push-failed",
                "--push {name}: {address}: {reason}; {outcome}",
                name=name,
                address=address,
                reason=reason,
                outcome=outcome,
            ) from error
