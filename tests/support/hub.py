"""A small hub on this machine, with what `create_repo` and `upload_folder` ask of the real one."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_writer"


@dataclass
class Hub:
    """Repositories by name: whether they are private, and their files. `broken` is a status for every commit."""

    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    role: str = "write"
    broken: int | None = None
    calls: list[str] = field(default_factory=list)
    endpoint: str = ""


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that listens while the block runs."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        """One request."""

        def log_message(self, *_: object) -> None:
            return

        def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            for key, word in {"Content-Type": "application/json", "Content-Length": str(len(body))}.items():
                self.send_header(key, word)
            for key, word in (headers or {}).items():
                self.send_header(key, word)
            self.end_headers()
            self.wfile.write(body)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def refused(self) -> bool:
            state.calls.append(f"{self.command} {self.path.split('?')[0]}")
            if self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.path.startswith("/store/"):
                return False
            self.answer(401, {"error": "Invalid credentials"})
            return True

        def do_GET(self) -> None:
            if self.refused():
                return
            if self.path == "/api/whoami-v2":
                return self.answer(200, {"name": "me", "auth": {"accessToken": {"role": state.role}}})
            first = 1 if "/resolve/" in self.path else 3
            repo = "/".join(self.path.split("?")[0].split("/")[first : first + 2])
            if repo not in state.private:
                return self.answer(404, {"error": "Not found"}, {"X-Error-Code": "RepoNotFound"})
            if "/resolve/" in self.path:
                return self.send(repo, unquote(self.path.split("?")[0].split("/resolve/main/")[1]))
            if "/tree/" in self.path:
                files = state.files[repo]
                return self.answer(200, [entry(name, content) for name, content in files.items()])
            self.answer(200, {"id": repo, "private": state.private[repo], "sha": "0" * 40, "siblings": []})

        do_HEAD = do_GET

        def send(self, repo: str, name: str) -> None:
            """A file of a repository, as downloads ask for it."""
            content = state.files[repo].get(name)
            if content is None:
                return self.answer(404, {"error": "Not found"}, {"X-Error-Code": "EntryNotFound"})
            oid, size = entry(name, content)["oid"], str(len(content))
            self.send_response(200)
            for key, word in {"ETag": f'"{oid}"', "X-Repo-Commit": "0" * 40, "Content-Length": size}.items():
                self.send_header(key, word)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_POST(self) -> None:
            if self.refused():
                return
            content, path = self.body(), self.path.split("?")[0]
            if path.endswith("/commit/main"):
                return self.commit("/".join(path.split("/")[3:5]), content)
            said = json.loads(content)
            if path == "/api/repos/create":
                return self.create(f"{said['organization']}/{said['name']}", said)
            if path == "/api/validate-yaml":
                return self.answer(200, {"errors": [], "warnings": []})
            if path.endswith("/preupload/main"):
                large = {True: "lfs", False: "regular"}
                files = [
                    {"path": f["path"], "uploadMode": large[f["path"].endswith("safetensors")]} for f in said["files"]
                ]
                return self.answer(200, {"files": [f | {"shouldIgnore": False} for f in files]})
            if path.endswith("/info/lfs/objects/batch"):
                links = [
                    {
                        "oid": o["oid"],
                        "size": o["size"],
                        "actions": {"upload": {"href": f"{state.endpoint}/store/{o['oid']}"}},
                    }
                    for o in said["objects"]
                ]
                return self.answer(200, {"transfer": "basic", "objects": links})
            self.answer(404, {"error": path})

        def do_PUT(self) -> None:
            if self.refused():
                return
            content = self.body()
            state.stored[hashlib.sha256(content).hexdigest()] = content
            self.answer(200, {})

        def create(self, repo: str, said: dict[str, Any]) -> None:
            if repo in state.private:
                return self.answer(
                    409, {"error": "You already created this model repo", "url": f"{state.endpoint}/{repo}"}
                )
            state.private[repo] = said.get("visibility") == "private" or said.get("private") is True
            state.files[repo] = {}
            self.answer(200, {"url": f"{state.endpoint}/{repo}", "name": repo})

        def commit(self, repo: str, content: bytes) -> None:
            if state.broken:
                return self.answer(state.broken, {"error": "The hub is full"})
            for line in map(json.loads, content.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    state.files[repo][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    state.files[repo][value["path"]] = state.stored[value["oid"]]
                elif line["key"] == "deletedFile":
                    del state.files[repo][value["path"]]
            url = f"{state.endpoint}/{repo}/commit/{'1' * 40}"
            self.answer(200, {"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def entry(name: str, content: bytes) -> dict[str, Any]:
    """A file as the tree of a repository lists it."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # as git has it
    return {"type": "file", "path": name, "size": len(content), "oid": oid}
