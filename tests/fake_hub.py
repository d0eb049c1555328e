"""A Hub in memory behind the real `huggingface_hub` client, which is given a transport that answers from here."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils._http import default_client_factory

httpx = sys.modules[HTTPError.__module__.split(".")[0]]  # httpx or httpx2, as the installed client uses

WRITE, READ = "hf_write", "hf_read"
ENDPOINT = "https://huggingface.co"


class FakeHub:
    """Repositories of files, per branch, and every request that came.

    Attributes:
        repos: repository id → branch → path → content.
        gated: ids that nobody may read.
        requests: "METHOD path" of each request, in order.
        down: whether no request gets through.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.down = False

    def add(self, repo_id: str, files: dict[str, bytes] | Path, branch: str = "main") -> str:
        """A repository, from a dict or from the files of a folder; gives its commit."""
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in files.rglob("*") if p.is_file()}
        self.repos.setdefault(repo_id, {"main": {}})[branch] = dict(files)
        return self.commit(repo_id, branch)

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        return self.repos[repo_id][branch]

    def card(self, repo_id: str, branch: str = "main") -> str:
        return self.files(repo_id, branch)["README.md"].decode()

    def commit(self, repo_id: str, branch: str = "main") -> str:
        return hashlib.sha1(repr((repo_id, sorted(self.files(repo_id, branch).items()))).encode()).hexdigest()

    # ----------------------------------------------------------------------------------------------------------------
    def answer(self, request):
        path = unquote(request.url.path)
        if path != "/api/agent-harnesses":  # the client's own affair, at most once per process
            self.requests.append(f"{request.method} {path}")
        if self.down:
            raise httpx.ConnectError("no route to host", request=request)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if path == "/api/whoami-v2":
            return _json(200, {"name": "me", "type": "user", "auth": {}}) if token else _json(401, {})
        if path == "/api/validate-yaml":
            return _json(200, {"errors": [], "warnings": []})
        if request.method == "POST":
            if not token:
                return _json(401, {"error": "Invalid username or password."})
            if token != WRITE:
                return _json(403, {"error": "You don't have the rights to do this."})
            return self._write(path, request)
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        if found:
            return self._look_up(
                found[1], found[2] or "main", lambda files, sha: _json(200, {"id": found[1], "sha": sha})
            )
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path)
        if found:
            return self._look_up(found[1], found[2], lambda files, sha: httpx.Response(200, json=_tree(files)))
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if found:
            return self._look_up(found[1], found[2], lambda files, sha: _file(files.get(found[3]), sha, request.method))
        return _json(404, {}, "EntryNotFound")

    def _look_up(self, repo_id, revision, answer):
        if repo_id in self.gated:
            return _json(403, {}, "GatedRepo")
        if repo_id not in self.repos:
            return _json(404, {}, "RepoNotFound")
        for branch, files in self.repos[repo_id].items():
            if revision in (branch, self.commit(repo_id, branch)):
                return answer(files, self.commit(repo_id, branch))
        return _json(404, {}, "RevisionNotFound")

    def _write(self, path, request):
        if path == "/api/repos/create":
            wanted = json.loads(request.content)
            repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            known = repo_id in self.repos
            self.repos.setdefault(repo_id, {"main": {}})
            return _json(409 if known else 200, {"url": f"{ENDPOINT}/{repo_id}"})
        repo_id, action, revision = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)/(.+)", path).groups()
        if repo_id not in self.repos:
            return _json(404, {}, "RepoNotFound")
        branches = self.repos[repo_id]
        if action == "branch":
            known = revision in branches
            branches.setdefault(revision, dict(branches["main"]))
            return _json(409 if known else 200, {})
        if revision not in branches:
            return _json(404, {}, "RevisionNotFound")
        if action == "preupload":
            files = json.loads(request.content)["files"]
            return _json(
                200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        assert action == "commit", path
        for line in request.content.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                branches[revision][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        oid = self.commit(repo_id, revision)
        url = f"{ENDPOINT}/{repo_id}/commit/{oid}"
        return _json(200, {"commitUrl": url, "commitOid": oid, "pullRequestUrl": f"{ENDPOINT}/{repo_id}/discussions/1"})


def _json(status, values, error_code=None):
    return httpx.Response(status, json=values, headers={"X-Error-Code": error_code} if error_code else {})


def _tree(files):
    return [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in files.items()
    ]


def _file(content, sha, method):
    headers = {"X-Repo-Commit": sha}
    if content is None:
        return httpx.Response(404, headers={**headers, "X-Error-Code": "EntryNotFound"})
    headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Content-Length": str(len(content))}
    return httpx.Response(200, headers=headers, content=b"" if method == "HEAD" else content)


@contextlib.contextmanager
def connected(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[FakeHub]:
    """An empty fake Hub, an empty cache below `folder`, and a token that may write."""
    fake = FakeHub()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", WRITE)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # it waits between its tries
    transport = httpx.MockTransport(lambda request: fake.answer(request))
    set_client_factory(lambda: httpx.Client(transport=transport, follow_redirects=True))
    try:
        yield fake
    finally:
        set_client_factory(default_client_factory)


def fill_cache(cache: Path, repo_id: str, folder: Path, revision: str = "main", commit: str = "0" * 40) -> Path:
    """Lays a folder's files into a Hub cache, as a download would; gives the snapshot's folder."""
    root = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    return snapshot
