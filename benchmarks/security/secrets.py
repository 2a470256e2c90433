"""Attempts to find secrets of the environment in what a run writes, and in pages of other runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aligner.config.compose import compose_config, save_config
from benchmarks.security.registry import HELD, Outcome, finding, probe

_TIMEOUT_S = 300.0
_REWARD = """
import logging, os

def score(prompts, completions, **fields):
    secret = os.environ["PLANTED_API_KEY"]
    print("printed:", secret)
    logging.getLogger("my.reward").warning("Authorization: Bearer %s", secret)
    return [float(len(text)) for text in completions]
"""


@contextlib.contextmanager
def _open_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aligner-secrets-") as name:
        yield Path(name)


def _run(directory: Path, *arguments: str, **variables: str) -> str:
    """Run an `aligner` command, and return everything that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "aligner", *arguments],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{directory}",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.stdout + done.stderr


def _judge(root: Path, output: str, secret: str) -> Outcome:
    """Return a finding if a secret is in a file below a directory, or in an output."""
    places = [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
    if secret in output:
        places.append("the output of the command")
    return finding(f"the secret is in {', '.join(places)}") if places else HELD


@probe(
    "secrets",
    attempt="find secrets of the environment in everything that a run writes and prints",
    expected="files contain interpolations, and logs contain ***",
    component="aligner launch",
)
def environment_of_a_run() -> Outcome:
    secret = f"Pl4nted{secrets.token_hex(12)}"
    with _open_directory() as directory:
        (directory / "planted_reward.py").write_text(_REWARD)
        output = _run(
            directory,
            "launch",
            "experiment=tiny_ppo",
            "run.steps=1",
            "run.dir=run",
            "reward.function=planted_reward:score",
            "logging.mlflow.enabled=true",
            # Nothing listens on this port, so that errors contain the address.
            "logging.mlflow.tracking_uri=http://me:${oc.env:PLANTED_API_KEY}@127.0.0.1:9",
            PLANTED_API_KEY=secret,
        )
        logs = "".join(path.read_text() for path in (directory / "run/logs").glob("reward*.log"))
        if "printed:" not in logs:
            return finding(f"the probe failed: the run did not call the reward: {output[-500:]}")
        return _judge(directory, output, secret)


@probe(
    "secrets",
    attempt="make another user's report, status and diff resolve variables of their environment",
    expected="the pages and outputs contain the interpolation",
    component="aligner report, status, diff",
)
def environment_of_a_reader() -> Outcome:
    secret = f"Pl4nted{secrets.token_hex(12)}"
    with _open_directory() as directory:
        root = directory / "run"
        root.mkdir()
        save_config(
            compose_config(["experiment=tiny_ppo", f"run.dir={root}"]), root / "config.yaml"
        )
        text = (root / "config.yaml").read_text()
        planted = text.replace("project: aligner", "project: ${oc.env:PLANTED_TEXT}")
        if planted == text:
            return finding("the probe failed: config.yaml has no logging.wandb.project")
        (root / "config.yaml").write_text(planted)
        output = "".join(
            _run(directory, *arguments, PLANTED_TEXT=secret)
            for arguments in (("report", "run"), ("status", "run"), ("diff", "run", "run"))
        )
        return _judge(directory, output, secret)


@probe(
    "secrets",
    attempt="store a password that the configuration contains in plain text",
    expected="the launch is refused with the name of the key, and its error masks the password",
    component="logging.mlflow.tracking_uri",
)
def password_in_plain_text() -> Outcome:
    secret = f"Pl4nted{secrets.token_hex(12)}"
    with _open_directory() as directory:
        output = _run(
            directory,
            "launch",
            "experiment=tiny_ppo",
            "run.dir=run",
            "logging.mlflow.enabled=true",
            f"logging.mlflow.tracking_uri=http://me:{secret}@127.0.0.1:9",
        )
        if "logging.mlflow.tracking_uri: contains a password" not in output:
            return finding(f"the launch was not refused: {output[-300:]}")
        return _judge(directory, output, secret)
