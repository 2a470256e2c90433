"""Masking of secrets in text that other people may read."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from aligner.errors import AlignerError
from aligner.masking import find_url_secret, is_secret_entry, is_secret_variable, mask_secrets
from aligner.observability.logs import configure_logs
from aligner.terminal import print_text

SECRET = "Zq7vLw2pXk9mRt4s"
"""A secret that occurs nowhere else."""
TEXTS = [
    f"https://user:{SECRET}@host/path",
    f"postgresql+psycopg2://user:{SECRET}@host:5432/runs",
    f"cannot reach 'http://{SECRET}@127.0.0.1:9/v1'",
    f"http://host/score?model=a&api_key={SECRET}&n=1",
    f"http://host/score?token={SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"{{'Authorization': 'Bearer {SECRET}', 'Accept': '*/*'}}",
    f'{{"authorization": "Basic {SECRET}=="}}',
    f"[(b'authorization', b'{SECRET}')]",
    f"x-api-key: {SECRET}",
    f"triton-access-token: {SECRET}",
    f"environment.arguments.api_key={SECRET}: unknown",
    f"sent Bearer {SECRET}",
    f"machine host login user password {SECRET}",
    f"sk-proj-{SECRET}{SECRET}",
    f"hf_{SECRET}{SECRET}",
    f"ghp_{SECRET}{SECRET}",
    f"AKIA{SECRET.upper()}",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{SECRET}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_secret_forms_are_masked(text: str) -> None:
    masked = mask_secrets(text)
    assert SECRET not in masked and SECRET.upper() not in masked and "***" in masked
    assert mask_secrets(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "http://user@host:80/a:b@c",
        "git clone ssh://git@github.com/a/b",
        "reward.judge_url=https://user:${oc.env:KEY}@host",
        "environment.arguments.api_key: contains a secret in plain text",
        "the run's access key is missing or wrong",
        "basic understanding of bearer bonds",
        "Client(api_key=None, timeout=5)",
        "data.path=/home/me/data.jsonl: no such file",
        "reward.judge_key_variable=JUDGE_KEY: is not set",
        "2026-11-29 06:46:34 INFO trainer 0: step 3",
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert mask_secrets(text) == text


def test_values_of_secret_variables_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    assert mask_secrets(f"the answer was {SECRET}!") == "the answer was ***!"
    monkeypatch.setenv("MY_SERVICE_TOKEN", "short")
    assert mask_secrets("a short answer") == "a short answer"


@pytest.mark.parametrize("encode", [json.dumps, repr, quote, quote_plus, lambda text: text])
def test_escaped_values_and_single_lines_are_masked(
    encode: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", f'ä/"{SECRET}\\ +')
    assert SECRET not in mask_secrets(encode(f'ä/"{SECRET}\\ +'))
    # A private key is printed line by line.
    monkeypatch.setenv("MY_SERVICE_KEY", f"-----BEGIN KEY-----\n{SECRET}+/\n-----END KEY-----\n")
    assert SECRET not in mask_secrets(encode(f"{SECRET}+/"))


def test_names_of_secrets_are_recognized() -> None:
    variables = "OPENAI_API_KEY HF_TOKEN DB_PASSWORD GITHUB_PAT AWS_SECRET_ACCESS_KEY SLACK_AUTH"
    assert all(map(is_secret_variable, variables.split()))
    ordinary = "PATH MAX_TOKENS TOKENIZERS_PARALLELISM SSH_AUTH_SOCK NCCL_DEBUG TLS_KEY_FILE PATCH"
    assert not any(map(is_secret_variable, ordinary.split()))
    assert all(map(is_secret_entry, ("api_key", "Authorization", "X-Api-Key", "access_token")))
    assert not any(map(is_secret_entry, ("pad_token", "max_tokens", "judge_key_variable", "key")))


def test_url_with_interpolation_has_no_secret() -> None:
    assert find_url_secret("https://user:${oc.env:KEY}@host?api_key=${oc.env:KEY}") is None
    assert find_url_secret(f"https://user:{SECRET}@host") == "password"


def test_errors_logs_and_terminal_are_masked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = AlignerError(f"http://u:{SECRET}@h: no answer\nmore")
    assert str(error) == "http://u:***@h: no answer\nmore"
    assert error.summary == "http://u:***@h: no answer"
    print_text(f"Authorization: Bearer {SECRET}")
    streams = sys.stdout, sys.stderr
    handlers = logging.getLogger().handlers
    try:
        for format in ("text", "json"):
            configure_logs(format, "trainer")
            print(f"printed by a reward: http://u:{SECRET}@h")
            try:
                raise ValueError(f"https://u:{SECRET}@h")
            except ValueError:
                logging.getLogger("aligner").exception("failed with x-api-key: %s", SECRET)
            sys.stdout, sys.stderr = streams
    finally:
        sys.stdout, sys.stderr = streams
        logging.getLogger().handlers = handlers
        logging.captureWarnings(False)
    printed = capsys.readouterr().out
    assert SECRET not in printed and printed.count("***") >= 7


def test_masking_takes_linear_time() -> None:
    for text in (
        "a" * 10**6,
        "://a:" * 10**5,
        "authorization: " * 10**5,
        "eyJ" * 10**5,
        "-eyJaaaaaaaa" * 10**4,
    ):
        started = time.monotonic()
        mask_secrets(text)
        assert time.monotonic() - started < 5
