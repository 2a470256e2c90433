"""Tests of a new user's first commands: a run without an experiment, and `new`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aligner.cli import main
from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model

OWN = ["model.path=model", "algorithm=grpo", "data.path=sums.jsonl", "reward.function=gsm8k"]


def aligner(
    directory: Path, *arguments: str, seconds: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aligner", *arguments]
    environment = {
        **os.environ,
        "COLUMNS": "120",
        "HF_HUB_CACHE": str(directory / "hub"),
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=seconds, env=environment
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, and a file of sums whose prompt field has the name `question`."""
    directory = tmp_path_factory.mktemp("made")
    config = compose_config(
        ["experiment=tiny_ppo", "model=tiny_arithmetic", f"run.dir={directory / 'run'}"]
    )
    shutil.copytree(prepare_model(config), directory / "model")
    records = (
        {"question": f"{a}+{b}=", "answer": str(a + b)}
        for a in range(10, 20)
        for b in range(10, 20)
    )
    (directory / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shutil.rmtree(directory / "run")
    return directory


@pytest.fixture
def empty(made: Path, tmp_path: Path) -> Path:
    """A folder with only the model and the sums."""
    (tmp_path / "model").symlink_to(made / "model")
    shutil.copy(made / "sums.jsonl", tmp_path)
    return tmp_path


def test_validate_prints_automatic_values(empty: Path) -> None:
    done = aligner(empty, "validate", *OWN, "rollout.samples_per_prompt=4")
    assert done.returncode == 0, done.stderr
    assert "automatic: " in done.stdout and "policy: 3 layers" in done.stdout
    errors = done.stderr
    assert (
        "data.fields={prompt: question}" in errors
        and "the longest prompt of all 100 records has 6 tokens" in errors
    )
    assert "actor.optimizer.learning_rate=0.0001" in errors and "rollout.max_staleness=0" in errors
    assert "rollout.samples_per_prompt=" not in errors  # set on the command line, so not automatic
    assert sorted(path.name for path in empty.iterdir()) == ["model", "sums.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "experiment=NAME is missing; experiments: arithmetic, "),
        (
            OWN[1:],
            (
                "without an experiment, set your own model, data and reward:"
                " model.path=DIRECTORY_OR_NAME"
            ),
        ),
        (OWN[:3], "reward.function=NAME is missing"),
        ([*OWN[:2], OWN[3]], "data: no prompts or other records; set data.path=FILE"),
        ([*OWN, "data.path=absent.jsonl"], "data.path=absent.jsonl: no such file"),
        (["model.path=absent", *OWN[1:]], "model.path=absent: no such model directory"),
        (["model.path=org/absent", *OWN[1:]], "run `hf download org/absent`"),
        ([*OWN, "rollout.sample_per_prompt=3"], "did you mean rollout.samples_per_prompt?"),
    ],
)
def test_invalid_input_exits_2_without_traceback(
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(empty)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["launch", *overrides])
    errors = capsys.readouterr().err
    assert errors.startswith("aligner: error: ") and message in errors
    assert "Traceback" not in errors and not (empty / "runs").exists()


@pytest.mark.promise("first-run-in-three-lines")
@pytest.mark.slow
def test_first_run_resumes_with_its_automatic_values(empty: Path) -> None:
    arguments = [*OWN, "run.dir=run", "run.stop_after=2"]
    done = aligner(empty, "launch", *arguments, seconds=250)
    assert done.returncode == 0, done.stderr
    stored = yaml.safe_load((empty / "run" / "config.yaml").read_text())
    assert "rollout.prompts_per_step" in stored["run"]["chosen"] and stored["data"]["fields"] == {
        "prompt": "question"
    }
    lines = (empty / "sums.jsonl").read_text().splitlines(keepends=True)
    # With other data, other automatic steps would be chosen.
    (empty / "sums.jsonl").write_text("".join(lines[:90]))
    resume = ("run.dir=run", "run.stop_after=3", "run.resume=true")
    refused = aligner(empty, "launch", *OWN, *resume, seconds=250)
    assert refused.returncode == 1 and "run.changes=[data.path]" in refused.stderr

    on = aligner(empty, "launch", *OWN, *resume, "run.changes=[data.path]", seconds=250)
    assert on.returncode == 0, on.stderr
    assert "chosen" not in on.stderr
    again = yaml.safe_load((empty / "run" / "config.yaml").read_text())
    assert (
        again["run"]["chosen"] == stored["run"]["chosen"]
        and again["run"]["steps"] == stored["run"]["steps"]
    )
    metrics = [
        json.loads(line) for line in (empty / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in metrics] == [1, 2, 3]


def test_model_name_is_found_in_hugging_face_cache(empty: Path) -> None:
    repository = empty / "hub" / "models--org--sums"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(empty / "model", repository / "snapshots" / ("0" * 40))
    done = aligner(empty, "validate", "model.path=org/sums", *OWN[1:])
    assert done.returncode == 0, done.stderr
    assert "policy: 3 layers" in done.stdout


def test_aligner_new_creates_a_valid_experiment(empty: Path) -> None:
    done = aligner(empty, "new", "mine")
    assert (
        done.returncode == 0
        and "aligner launch   --config-dir . experiment=my_experiment" in done.stdout
    )
    directory, model = empty / "mine", f"model.path={empty / 'model'}"
    # The tiny tokenizer has no capital letters.
    (directory / "data.jsonl").write_text(
        (directory / "data.jsonl").read_text().replace("What is ", "what is ")
    )
    asked = ["--config-dir", ".", "experiment=my_experiment", model]
    done = aligner(directory, "validate", *asked)
    assert done.returncode == 0, done.stderr
    assert (
        "function my_reward:score" in done.stdout
        and "the longest prompt of all 4 records" in done.stderr
    )
    done = aligner(directory, "prepare", *asked, "run.dir=run")
    assert done.returncode == 0, done.stderr
    done = aligner(directory, "launch", *asked, "cluster=my_slurm", "--dry-run")
    assert done.returncode == 0 and "#SBATCH --partition=gpu" in done.stdout, done.stderr
    done = aligner(empty, "new", "mine")
    assert done.returncode == 2 and "existing files are not overwritten" in done.stderr


def test_scorer_in_working_directory_is_imported(empty: Path) -> None:
    """Unlike with `python -m`, the command's own directory is the first entry of `sys.path`."""
    (empty / "bin").mkdir()
    (empty / "bin" / "command.py").write_text("from aligner.cli import main\nmain()\n")
    (empty / "mine.py").write_text("def score(requests):\n    return [0.5 for _ in requests]\n")
    (empty / "asked.jsonl").write_text('{"prompt": "1+1="}\n')
    asked = [
        "evaluate",
        "model",
        "--prompts",
        "asked.jsonl",
        "--function",
        "mine:score",
        "--max-new-tokens",
        "2",
        "--json",
    ]
    command = [sys.executable, "bin/command.py", *asked]
    done = subprocess.run(command, cwd=empty, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["eval/score"] == 0.5, done.stderr


def test_version_and_command_suggestion_are_printed(tmp_path: Path) -> None:
    assert aligner(tmp_path, "--version").stdout == "aligner 0.3.0\n"
    done = aligner(tmp_path, "lanch", *OWN)
    assert (
        done.returncode == 2
        and "lanch: unknown command; did you mean launch? available commands: launch, validate,"
        in done.stderr
    )
