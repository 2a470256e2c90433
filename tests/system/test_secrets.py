"""Secrets in the environment and in messages reach nothing that a run writes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from aligner.config.compose import compose_config, load_own_config, save_config
from aligner.observability.metrics import MetricsWriter
from aligner.observability.sinks import open_sinks
from aligner.paths import get_run_paths
from aligner.training.run_checkpoints import RunCheckpoints
from aligner.view.saved_page import write_report
from tests.training.test_run_checkpoints import commit

SECRET = "not-for-others"
_SECRET_VARIABLES = (
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "GITHUB_PAT",
    "DB_PASSWORD",
    "SLACK_AUTH",
)
"""Variables whose names say that they are secret."""
_REFERENCED_VARIABLES = ("TRACKER_LOGIN", "TEAM_NOTE", "ENDPOINT_PART", "GREETING")
"""Variables that the configuration of the run refers to."""
_FORMS = {
    "url": "https://user:{}@example.org/v1",
    "url_token": "https://{}@example.org/repository",
    "parameter": "http://example.org/score?api_key={}&n=1",
    "bearer": "Authorization: Bearer {}",
    "basic": "{{'authorization': 'Basic {}='}}",
    "header": "x-api-key: {}",
    "netrc": "machine example.org login user password {}",
    "openai": "sk-proj-{0}{0}",
    "hugging_face": "hf_{0}{0}",
    "github": "ghp_{0}{0}",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{}",
}
"""Texts with secrets that the reward function prints, logs and raises."""
_REWARD = """
import json, logging, os, warnings

TEXTS = json.loads(os.environ["PLANTED_TEXTS"])
calls = 0

def score(prompts, completions, **fields):
    global calls
    calls += 1
    for name, value in [*os.environ.items(), *TEXTS.items()]:
        if name not in ("PLANTED_TEXTS", "ALIGNER_READ_VARIABLES"):
            print("printed:", value)
            logging.getLogger("my.reward").warning("logged: %s", value)
    warnings.warn("warned: " + " ".join(TEXTS.values()))
    if calls == 2:
        raise ValueError("raised: " + " ".join([os.environ["DB_PASSWORD"], *TEXTS.values()]))
    return [float(len(response)) for response in completions]
"""


def _run(
    directory: Path, environment: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aligner", *arguments],
        cwd=directory,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def _find(root: Path, secret: str) -> list[Path]:
    """Return the files below a directory that contain a secret."""
    return [
        path
        for path in root.rglob("*")
        if path.is_file()
        and (secret.encode() in path.read_bytes() or secret.encode() in str(path).encode())
    ]


@pytest.mark.promise("secrets-reach-no-file")
@pytest.mark.slow
def test_planted_secrets_reach_no_file_of_a_run(tmp_path: Path) -> None:
    names = (*_SECRET_VARIABLES, *_REFERENCED_VARIABLES, *_FORMS)
    planted = {name: f"Pl4nted{secrets.token_hex(8)}" for name in names}
    assert len(planted) >= 20
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}",
        **{name: planted[name] for name in (*_SECRET_VARIABLES, *_REFERENCED_VARIABLES)},
        "PLANTED_TEXTS": json.dumps(
            {name: form.format(planted[name]) for name, form in _FORMS.items()}
        ),
    }
    # Otherwise, the file of the reward would contain nothing to be masked.
    (tmp_path / "planted_reward.py").write_text(_REWARD)
    overrides = (
        "experiment=tiny_ppo",
        "run.steps=3",
        "run.dir=run",
        "reward.function=planted_reward:score",
        "rollout.max_skipped_prompts=100",
        "rollout.max_skipped_fraction=1",
        "logging.wandb.enabled=true",
        "logging.wandb.project=${oc.env:TEAM_NOTE,x}",
        "logging.mlflow.enabled=true",
        # Nothing listens on this port, so that the tracker's errors are logged with its address.
        "logging.mlflow.tracking_uri=http://user:${oc.env:TRACKER_LOGIN}@127.0.0.1:9",
        "+logging.mlflow.tags={endpoint: '${oc.env:ENDPOINT_PART}'}",
        "logging.wandb.group=${oc.env:GREETING}",
    )
    launch = _run(tmp_path, environment, "launch", *overrides)
    assert launch.returncode in (0, 1), launch.stderr
    others = [
        _run(tmp_path, environment, command, "run") for command in ("report", "status", "diff")
    ]
    root = tmp_path / "run"
    logs = "".join(path.read_text() for path in (root / "logs").rglob("*.log"))
    assert "printed: " in logs and "logged: " in logs and "warned: " in logs, logs[-3000:]
    outputs = "".join(done.stdout + done.stderr for done in (launch, *others))
    leaks = {
        name: (_find(root, secret), secret in outputs)
        for name, secret in planted.items()
        if _find(root, secret) or secret in outputs
    }
    # W&B needs the names of the project and the group themselves.
    for name in ("TEAM_NOTE", "GREETING"):
        files, is_printed = leaks.pop(name, ([], False))
        assert not is_printed and all((root / "wandb") in path.parents for path in files), files
    assert not leaks, leaks


@pytest.mark.slow
def test_secret_values_are_stored_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TOKEN", SECRET)
    root = tmp_path / "run"
    root.mkdir()
    config = compose_config(
        [
            *(
                "experiment=tiny_ppo",
                f"run.dir={root}",
                "cluster=slurm",
                "+cluster.slurm.environment.TOKEN=${oc.env:TOKEN}",
                "+cluster.slurm.environment.PRIVATE=only-in-config",
            ),
            "+cluster.slurm.roles.critic.environment={TOKEN: '${oc.env:TOKEN}'}",
            *(f"logging.{tracker}.enabled=true" for tracker in ("wandb", "mlflow")),
        ]
    )
    paths = get_run_paths(config)
    save_config(config, paths.config)
    commit(RunCheckpoints(config), 1)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.write(1, {"reward/mean": 0.5})
    write_report(root)
    assert _find(root, SECRET) == []
    assert _find(root, "only-in-config") == [paths.config]
    environment = load_own_config(paths.config).cluster.slurm.environment
    assert environment["TOKEN"] == SECRET, "a job that resumes has it"
    # The name of the variable is in the configuration, manifest, report and both trackers.
    assert len(_find(root, "TOKEN")) >= 5
