"""A local server with the API of the Hugging Face Hub, for one repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

REVISION = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(BaseHTTPRequestHandler):
    """Handle the requests of a download: the repository's description, file lists and files."""

    repository: ClassVar[str]
    """Path of the repository in the API, such as `models/org/name`."""
    files: ClassVar[dict[str, bytes]]
    """Contents of the repository's files, by name."""

    def do_HEAD(self) -> None:
        self._answer(self._find_content(), with_body=False)

    def do_GET(self) -> None:
        self._answer(self._find_content(), with_body=True)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names = [name for name in self.files if name.replace("/", "%2F") in body or name in body]
        self._answer(json.dumps(self._list_files(names)).encode(), with_body=True)

    def _find_content(self) -> bytes:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/{self.repository}"):
            siblings = [{"rfilename": name} for name in self.files]
            name = self.repository.partition("/")[2]
            info = {"id": name, "sha": REVISION, "siblings": siblings}
            _, is_tree, folder = path.partition(f"/tree/{REVISION}")
            names = [name for name in self.files if name.startswith(folder.strip("/"))]
            return json.dumps(self._list_files(names) if is_tree else info).encode()
        # the file's name follows the revision
        return self.files.get(path.partition("/resolve/")[2].partition("/")[2], b"")

    def _list_files(self, names: list[str]) -> list[dict[str, object]]:
        return [
            {
                "type": "file",
                "path": name,
                "oid": hashlib.sha1(self.files[name]).hexdigest(),
                "size": len(self.files[name]),
            }
            for name in names
        ]

    def _answer(self, content: bytes, *, with_body: bool) -> None:
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serve_hub(handler: type[HubHandler]) -> Iterator[str]:
    """Run a server with this handler, and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
