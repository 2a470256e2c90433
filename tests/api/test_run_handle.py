"""Tests of runs that are launched, read and stopped from Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

import aligner
from tests.system import scorers


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory; its launches that outlive the test are terminated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    yield tmp_path
    for child in psutil.Process().children():
        if "launch" in child.cmdline():
            child.terminate()
            child.wait(60)


TINY = {"experiment": "tiny_ppo", "rollout": {"max_response_tokens": 8}}


def test_package_import_loads_no_heavy_module() -> None:
    heavy = {"torch", "hydra", "pandas", "pyarrow", "rich", "yaml", "IPython"}
    code = f"import aligner, sys; print(sorted({heavy} & {{*sys.modules}}), dir(aligner))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (
        done.stdout.startswith("[] ") and "'launch'" in done.stdout and "'load_run'" in done.stdout
    )


@pytest.mark.slow
def test_invalid_arguments_raise_config_error(place: Path) -> None:
    with pytest.raises(
        aligner.ConfigError, match=r"^rollout\.sample_per_prompt: unknown key; did you mean"
    ):
        aligner.launch(**TINY, data=[{"prompt": "a"}], **{"rollout.sample_per_prompt": 2})
    with pytest.raises(aligner.ConfigError, match="absent: no such directory"):
        aligner.load_run("absent")
    with pytest.raises(aligner.ConfigError, match="no such model directory"):
        aligner.launch("absent", "grpo", "digit_fraction", [{"prompt": "a"}])
    assert not list(place.glob("runs/*"))


@pytest.mark.slow
def test_launched_run_provides_metrics_and_samples(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": "hello"}, {"prompt": "numbers"}]
    run = aligner.launch(
        **TINY, reward=scorers.raising, data=records, run={"steps": 3, "dir": "run"}
    )
    assert run.directory == place / "run" and run.state in ("starting", "running")
    assert run.wait() is run and run.state == "finished"
    out = capsys.readouterr().out
    assert (
        "step 3/3  reward" in out
        and "next steps:" in out
        and f"aligner view {run.directory}" in out
    )
    stored = yaml.safe_load((place / "run" / "config.yaml").read_text())
    assert (
        stored["reward"]["function"] == f"{scorers.__name__}:raising"
        and stored["run"]["steps"] == 3
    )
    assert (place / "run" / "data.jsonl").read_text().splitlines() == [
        '{"prompt": "hello"}',
        '{"prompt": "numbers"}',
    ]
    metrics = run.metrics()
    assert list(metrics.index) == [1, 2, 3] and metrics["reward/mean"].notna().all()
    assert len(run.samples(steps=[1])) and set(run.samples(steps=[1])["prompt"]) <= {
        "hello",
        "numbers",
    }
    tokens = run.samples(steps=[2], tokens=True, columns=["text", "trainer_logprob"])
    assert list(tokens.columns) == ["text", "trainer_logprob"] and len(tokens["text"][0]) == len(
        tokens["trainer_logprob"][0]
    )
    again = aligner.load_run("run")
    assert (
        again.wait().state == "finished"
        and "step 3/3" in repr(again)
        and again.config.run.steps == 3
    )
    one, two = aligner.generate(run, ["hello", "numbers"], max_new_tokens=4, greedy=True)
    assert one["prompt"] == "hello" and two["response"]
    assert (run.export("model") / "config.json").is_file()
    with pytest.raises(aligner.ConfigError, match="already exists"):
        aligner.launch(
            **TINY, data=records, reward="digit_fraction", run={"steps": 3, "dir": "run"}
        )
    with pytest.raises(aligner.ConfigError, match="uses other records"):
        aligner.launch(
            **TINY, data=records[:1], reward="digit_fraction", run={"steps": 3, "dir": "run"}
        )


@pytest.mark.slow
def test_stopped_run_can_be_resumed(place: Path) -> None:
    run = aligner.launch(**TINY, run={"steps": 5000, "dir": "run"})
    with pytest.raises(TimeoutError):
        run.wait(timeout_s=0.5)
    while not len(run.metrics()):
        assert run.state in ("starting", "running")
    aligner.load_run("run").stop()
    assert run.state == "stopped"
    with pytest.raises(aligner.Stopped, match="stopped on request after saving a checkpoint"):
        run.wait()
    with pytest.raises(aligner.Stopped, match="resume the run with"):
        aligner.load_run("run").wait()
    done = len(run.metrics())
    on = aligner.launch(
        **TINY, run={"steps": 5000, "dir": "run", "resume": "true", "stop_after": done + 1}
    )
    assert len(on.wait().metrics()) == done + 1


@pytest.mark.slow
def test_failed_run_raises_error_of_launcher(place: Path) -> None:
    (place / "failing.py").write_text(
        "def score(requests):\n    raise RuntimeError('no score today')\n"
    )
    run = aligner.launch(**TINY, reward="failing:score", run={"steps": 2})
    with pytest.raises(aligner.AlignerError, match="no score today"):
        run.wait()
    assert run.state == "failed"
