"""Runs `aligner view` as a process, and sends requests to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class Viewer:
    """A client of the server at a link; it sends the server's cookie after `open`."""

    def __init__(self, link: str, pid: int | None = None) -> None:
        self.link, self.pid, parts = link, pid, urlsplit(link)
        self.host, self._cookie = parts.netloc, ""

    def open(self) -> Answer:
        answer = self.get("/?" + urlsplit(self.link).query)
        self._cookie = answer.headers["set-cookie"].split(";")[0]
        return answer

    def post(self, path: str, fields: Mapping[str, str], **headers: str) -> Answer:
        """Send a form as a browser does from a page of the server; `headers` replace its headers."""
        form_headers = {
            "Origin": f"http://{self.host}",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        return self.get(path, "POST", urlencode(fields), **form_headers | headers)

    def get(self, path: str, method: str = "GET", body: str = "", **headers: str) -> Answer:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        try:
            given = {
                "Cookie": self._cookie,
                **{name.replace("_", "-"): value for name, value in headers.items()},
            }
            connection.request(method, path, body or None, headers=given)
            answer = connection.getresponse()
            text = answer.read().decode()
            return Answer(
                answer.status, {name.lower(): value for name, value in answer.getheaders()}, text
            )
        finally:
            connection.close()


@contextmanager
def serving(*directories: Path) -> Iterator[Viewer]:
    """Serve directories during the block, then interrupt the server as Ctrl-C does."""
    command = [sys.executable, "-m", "aligner", "view", *map(str, directories)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        assert link.startswith("http://127.0.0.1:"), process.communicate()
        yield Viewer(link, process.pid)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
