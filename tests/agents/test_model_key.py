"""`aligner serve-model` requires a key, and answers in spite of idle connections without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.agents.calling_model import saved
from tests.servers.test_idle_connections import IDLE_COUNT, open_idle

pytestmark = pytest.mark.slow


def request_models(url: str, key: str | None) -> int:
    """Return the status of a request for the list of models."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(f"{url}/models", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["data"]
            return int(response.status)
    except urllib.error.HTTPError as error:
        assert json.load(error)["error"]["code"] == "invalid_api_key"
        return error.code


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), "chatml")


@pytest.fixture
def start(model: Path) -> Iterator[object]:
    """Yield a function that starts the command, and returns its process."""
    processes: list[subprocess.Popen[str]] = []

    def start(*options: str, key: str | None = None) -> subprocess.Popen[str]:
        variables = {name: value for name, value in os.environ.items() if "MODEL_KEY" not in name}
        process = subprocess.Popen(
            [sys.executable, "-m", "aligner", "serve-model", str(model), *options],
            env=variables | ({} if key is None else {"ALIGNER_MODEL_KEY": key}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_generated_key_is_printed_and_required(start: object) -> None:
    process = start()  # type: ignore[operator]
    url = process.stdout.readline().strip()
    label, key = process.stdout.readline().split()
    assert label == "key:" and len(key) >= 32
    assert [request_models(url, each) for each in (None, "wrong", key)] == [401, 401, 200]
    with open_idle(urlsplit(url).port or 0, IDLE_COUNT):
        assert request_models(url, key) == 200
        assert request_models(url, None) == 401


def test_key_of_the_environment_is_required_and_not_printed(start: object) -> None:
    process = start(key="a-key-of-my-own")  # type: ignore[operator]
    url = process.stdout.readline().strip()
    assert [request_models(url, each) for each in (None, "a-key-of-my-own")] == [401, 200]
    process.send_signal(signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert output == "" and "a-key-of-my-own" not in error


def test_no_key_warns_if_others_can_connect(start: object) -> None:
    process = start("--no-key", "--host", "0.0.0.0")  # type: ignore[operator]
    url = process.stdout.readline().strip().replace("0.0.0.0", "127.0.0.1")
    assert request_models(url, None) == 200
    process.send_signal(signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert output == "" and "--no-key: everyone who can connect to" in error
