"""A local server that takes and serves models as the Hub does.

The routes are those that huggingface_hub 2.4 calls (hf_api.py, _commit_api.py, lfs.py,
file_download.py). Safetensors go by LFS, as the Hub's .gitattributes has it.
"""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.web import LocalServer

TOKEN, READ_TOKEN = "hf_of_acme", "hf_that_reads"


class Hub(LocalServer):
    """Repositories in memory: `commits` of each, newest last, and what each branch holds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, protocol="HTTP/1.1")
        handler: Any = self._server.RequestHandlerClass
        handler.do_POST = handler.do_PUT = handler.do_HEAD = handler.do_GET
        # A signed URL of another host, in truth: it must not get the token.
        self.storage = self.url.replace("127.0.0.1", "localhost") + "/storage"
        self.branches: dict[str, dict[str, dict[str, bytes]]] = {}  # repository, branch, name
        self.private: dict[str, bool] = {"other/theirs": False}
        self.commits: list[list[dict[str, Any]]] = []
        self.stored: dict[str, bytes] = {}  # by SHA-256
        self.asked: list[str] = []

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path, command = unquote(handler.path.partition("?")[0]), handler.command
        self.asked.append(f"{command} {path}")
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        if path.startswith("/storage/"):
            assert not token
            return self._storage(handler, path.removeprefix("/storage/"), body)
        if fault := self.next_fault():
            return self._say(handler, int(fault), {"error": "out of order"})
        if token not in (TOKEN, READ_TOKEN):
            return self._refuse(handler, 401, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            return self._say(handler, 200, {"name": "acme", "type": "user"})
        if command in ("GET", "HEAD"):
            return self._read(handler, path)
        content = [json.loads(line) for line in body.splitlines()]
        if path == "/api/validate-yaml":
            return self._say(handler, 200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(handler, content[0], token)
        found = re.fullmatch(r"/(?:api/models/)?(\w+/[\w-]+)(?:\.git)?/(\w+)/(.*)", path)
        assert found is not None, path
        if found[1] not in self.branches:
            return self._refuse(handler, 404, "RepoNotFound", code="RepoNotFound")
        return self._write(handler, found.groups(), content)

    def _create(self, handler: BaseHTTPRequestHandler, asked: dict[str, Any], token: str) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if token == READ_TOKEN or asked["organization"] != "acme":
            return self._refuse(handler, 403, "You don't have the rights to create a model")
        if name in self.branches:
            told = {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            return self._say(handler, 409, told)
        self.branches[name] = {"main": {}}
        self.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return self._say(handler, 200, {"url": f"{self.url}/{name}", "name": name})

    def _write(
        self, handler: BaseHTTPRequestHandler, route: Any, content: list[dict[str, Any]]
    ) -> None:
        repository, action, rest = route
        branches = self.branches[repository]
        if action == "branch":
            is_new = rest not in branches
            branches.setdefault(rest, dict(branches["main"]))
            return self._say(
                handler, 200 if is_new else 409, {} if is_new else {"error": "is there"}
            )
        if action == "info":
            objects = [self._offer(one) for one in content[0]["objects"]]
            return self._say(handler, 200, {"transfer": "basic", "objects": objects})
        if action == "verify":
            assert self.stored[content[0]["oid"]]
            return self._say(handler, 200, {})
        if rest not in branches:
            return self._refuse(handler, 404, "Revision not found", code="RevisionNotFound")
        if action == "preupload":
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in content[0]["files"]
            ]
            return self._say(handler, 200, {"files": modes})
        assert action == "commit"
        for line in content[1:]:
            value = line["value"]
            name = value["path"]
            if line["key"] == "lfsFile":
                branches[rest][name] = self.stored[value["oid"]]
            else:
                branches[rest][name] = base64.b64decode(value["content"])
        self.commits.append(content)
        url = f"{self.url}/{repository}/commit/{_oid(branches[rest])}"
        return self._say(handler, 200, {"commitUrl": url, "commitOid": _oid(branches[rest])})

    def _offer(self, one: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.storage}/{one['oid']}", "header": {}}
        return one if one["oid"] in self.stored else one | {"actions": {"upload": upload}}

    def _storage(self, handler: BaseHTTPRequestHandler, oid: str, body: bytes) -> None:
        if handler.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == oid
            self.stored[oid] = body
        self._send(handler, 200, b"" if handler.command == "PUT" else self.stored[oid], {})

    def _read(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        if found := re.fullmatch(r"/api/models/(\w+/[\w-]+)", path):
            if found[1] not in self.private:
                return self._refuse(handler, 404, "RepoNotFound", code="RepoNotFound")
            about: dict[str, Any] = {
                "id": found[1],
                "private": self.private[found[1]],
                "sha": "0" * 40,
                "tags": [],
            }
            return self._say(handler, 200, about | {"siblings": []})
        found = re.fullmatch(r"/(\w+/[\w-]+)/resolve/([^/]+)/(.+)", path)
        assert found is not None, path
        files = self.branches[found[1]][found[2]]
        if found[3] not in files:
            return self._refuse(handler, 404, "Entry not found", code="EntryNotFound")
        content = files[found[3]]
        oid = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": _oid(files), "ETag": f'"{oid}"'}
        if oid in self.stored:
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
            return self._send(handler, 302, b"", headers | {"Location": f"{self.storage}/{oid}"})
        return self._send(handler, 200, content, headers)

    def _refuse(
        self, handler: BaseHTTPRequestHandler, status: int, message: str, code: str = ""
    ) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(handler, status, json.dumps({"error": message}).encode(), headers)

    def _say(self, handler: BaseHTTPRequestHandler, status: int, content: Any) -> None:
        self._send(handler, status, json.dumps(content).encode(), {})

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        self.send(handler, status, body, headers | {"Content-Type": "application/json"})


def _oid(files: dict[str, bytes]) -> str:
    """A commit's name: 40 digits that depend on its files."""
    content = b"".join(name.encode() + body for name, body in sorted(files.items()))
    return hashlib.sha1(content).hexdigest()
