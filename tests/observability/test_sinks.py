"""Weights & Biases and MLflow, for real and without a network."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.observability.metrics import MetricsSink, MetricsWriter, Record, read_metrics
from aligner.observability.sinks import (
    SUPERSEDED,
    BackgroundSink,
    MlflowSink,
    TensorBoardSink,
    open_sinks,
)
from aligner.paths import RunPaths, run_paths
from aligner.schema import Config
from tests.observability.tracker_readers import (
    Steps,
    mlflow_client,
    mlflow_steps,
    tensorboard_steps,
    tensorboard_writes,
    wandb_records,
    wandb_steps,
)

TRACKERS: dict[str, Callable[[RunPaths], Steps]] = {"wandb": wandb_steps, "mlflow": mlflow_steps}
ON = [f"logging.{name}.enabled=true" for name in TRACKERS]


@pytest.fixture(autouse=True)
def _as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # as the sink sets it, for the reader here
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def configured(directory: Path, *overrides: str) -> Config:
    directory.mkdir(exist_ok=True)
    return compose_config(
        ["experiment=tiny_ppo", f"run.dir={directory}", "logging.tensorboard=false", *overrides]
    )


def metrics(step: int, more: float = 0.0) -> dict[str, float]:
    return {
        "reward/mean": step / 10 + more,
        "policy/loss": -0.5,
        "eval/pass@1": 0.1,
        "time/step": 1e-300 * step,
    }


def named(steps: Steps) -> Steps:
    """Metrics as MLflow, which has no @, calls them."""
    return [{key.replace("@", "_"): value for key, value in step.items()} for step in steps]


KILLED = """
import os, signal, sys, time
from aligner.config.compose import compose_config
from aligner.paths import run_paths
from aligner.observability.metrics import MetricsWriter
from aligner.observability.sinks import open_sinks
from tests.observability.test_sinks import metrics
config = compose_config(sys.argv[2:])
writer = MetricsWriter(run_paths(config), open_sinks(config, run_paths(config)))
writer.truncate_after(0)
for step in range(int(sys.argv[1])):
    writer.write(step, metrics(step))
paths = run_paths(config)
while not [f for f in paths.mlflow.glob("*/*/metrics/policy/loss") if f.read_text().count("\\n") == 6]:
    time.sleep(0.05)
while not paths.tracker_run("wandb").exists() or not [*paths.wandb.glob("offline-run-*/*.wandb")]:
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.promise("trackers-equal-metrics-file")
@pytest.mark.slow
def test_a_killed_and_resumed_run_is_in_every_tracker_as_in_metrics_jsonl(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", *ON)
    paths = run_paths(config)
    overrides = ["experiment=tiny_ppo", f"run.dir={paths.root}", "logging.tensorboard=false", *ON]
    command = [sys.executable, "-c", KILLED, "6", *overrides]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=120, check=False)
    assert killed.returncode == -9 and len(read_metrics(paths.metrics)) == 6
    assert mlflow_steps(paths)[-1]["step"] == 5
    ids = {name: paths.tracker_run(name).read_text() for name in TRACKERS}
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.truncate_after(3)
        for step in (4, 5, 6):
            writer.write(step, metrics(step, more=0.5))
    expected = read_metrics(paths.metrics)
    assert [step["step"] for step in expected] == list(range(7)) and expected[4][
        "reward/mean"
    ] == 0.9
    assert wandb_steps(paths) == expected
    assert mlflow_steps(paths) == named(expected)
    assert {name: paths.tracker_run(name).read_text() for name in ids} == ids
    run = mlflow_client(paths).get_run(paths.tracker_run("mlflow").read_text())
    assert (run.info.status, run.info.run_name, run.data.params["rollout.prompts_per_step"]) == (
        "FINISHED",
        "run",
        "16",
    )


def test_a_tracked_run_has_its_name_tags_and_whole_configuration(tmp_path: Path) -> None:
    config = configured(
        tmp_path / "run", *ON, "logging.wandb.tags=[a,b]", "+logging.mlflow.tags.team=x"
    )
    paths = run_paths(config)
    with (
        pytest.raises(ValueError, match="diverged"),
        MetricsWriter(paths, open_sinks(config, paths)) as writer,
    ):
        writer.write(1, metrics(1))
        raise ValueError("diverged")
    (file,) = paths.wandb.glob("offline-run-*/*.wandb")
    records = {record.WhichOneof("record_type"): record for record in wandb_records(file)}
    run = records["run"].run
    assert (run.run_id, run.display_name, run.project) == (
        paths.tracker_run("wandb").read_text(),
        "run",
        "aligner",
    )
    assert [*run.tags] == ["a", "b"]
    assert {item.key for item in run.config.update} >= {"rollout", "actor", "seed"}
    assert records["exit"].exit.exit_code == 1
    stored = mlflow_client(paths).get_run(paths.tracker_run("mlflow").read_text())
    assert (stored.info.status, stored.info.run_name, stored.data.tags["team"]) == (
        "FAILED",
        "run",
        "x",
    )
    assert (stored.data.params["seed"], stored.data.params["model.config.hidden_size"]) == (
        "1",
        "64",
    )


TOLD_TO_END = """
import sys, time
from aligner.config.compose import compose_config
from aligner.paths import run_paths
from aligner.observability.metrics import MetricsWriter, recording
from aligner.observability.sinks import open_sinks
from tests.observability.test_sinks import metrics
config = compose_config(sys.argv[1:])
writer = MetricsWriter(run_paths(config), open_sinks(config, run_paths(config)))
with recording(writer, config.logging):
    for step in (1, 2, 3):
        writer.write(step, metrics(step))
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_run_that_is_told_to_end_leaves_all_its_steps_in_every_tracker(tmp_path: Path) -> None:
    paths = run_paths(configured(tmp_path / "run"))
    overrides = ["experiment=tiny_ppo", f"run.dir={paths.root}", "logging.tensorboard=false", *ON]
    command = [sys.executable, "-c", TOLD_TO_END, *overrides]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
        while not paths.tracker_run("wandb").exists() or not paths.tracker_run("mlflow").exists():
            assert run.poll() is None
            time.sleep(0.05)
        run.terminate()
        assert run.wait(60) == -signal.SIGTERM
    assert wandb_steps(paths) == read_metrics(paths.metrics)
    assert mlflow_steps(paths) == named(read_metrics(paths.metrics))
    assert (
        mlflow_client(paths).get_run(paths.tracker_run("mlflow").read_text()).info.status
        == "FAILED"
    )


def test_what_was_recorded_offline_before_a_resume_is_not_uploaded_with_the_rest(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path / "run", ON[0])
    paths = run_paths(config)
    for first in (0, 2):
        with MetricsWriter(paths, open_sinks(config, paths)) as writer:
            writer.truncate_after(first)
            for step in range(first + 1, first + 4):
                writer.write(step, metrics(step))
    assert (
        len(list(paths.wandb.glob("offline-run-*")))
        == len(list((paths.wandb / SUPERSEDED).iterdir()))
        == 1
    )
    assert wandb_steps(paths) == read_metrics(paths.metrics)


def test_a_store_that_fails_costs_the_run_nothing_and_gets_all_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tmp_path / "run", ON[1])
    paths = run_paths(config)
    paths.mlflow.write_text("in the way")
    sink = BackgroundSink(
        "mlflow",
        lambda: MlflowSink(config, paths),
        lambda: read_metrics(paths.metrics),
        retry_s=0.0,
    )
    with MetricsWriter(paths, [sink]) as writer:
        for step in (1, 2, 3):
            writer.write(step, metrics(step))
        deadline = time.monotonic() + 60
        while sink.failures < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        paths.mlflow.unlink()
        writer.write(4, metrics(4))
    assert (
        mlflow_steps(paths) == named(read_metrics(paths.metrics))
        and len(read_metrics(paths.metrics)) == 4
    )
    (told,) = [
        record.getMessage()
        for record in caplog.records
        if record.name == "aligner.observability.sinks"
    ]
    assert told.startswith(
        "mlflow cannot record metrics; the run continues and tries again later: "
    )


def test_a_store_that_was_away_when_the_run_was_resumed_drops_what_came_later_before(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path / "run", ON[1])
    paths = run_paths(config)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        for step in range(1, 6):
            writer.write(step, metrics(step))
    is_back = threading.Event()

    def open_sink() -> MetricsSink:
        if not is_back.is_set():
            raise OSError("away")
        return MlflowSink(config, paths)

    sink = BackgroundSink("mlflow", open_sink, lambda: read_metrics(paths.metrics), retry_s=0.0)
    with MetricsWriter(paths, [sink]) as writer:
        writer.truncate_after(2)
        for step in (3, 4):
            writer.write(step, metrics(step, more=0.5))
        deadline = time.monotonic() + 60
        while sink.failures < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        is_back.set()
    assert (
        mlflow_steps(paths) == named(read_metrics(paths.metrics))
        and len(read_metrics(paths.metrics)) == 4
    )


def test_a_run_that_was_killed_while_its_end_was_written_goes_on_in_mlflow(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", ON[1])
    paths = run_paths(config)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.write(1, metrics(1))
    begun = paths.tracker_run("mlflow").read_text()
    (description,) = paths.mlflow.glob(f"*/{begun}/meta.yaml")
    description.write_text("")  # as the store does before it writes
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.truncate_after(1)
        writer.write(2, metrics(2))
    run = mlflow_client(paths).get_run(begun)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (
        mlflow_steps(paths) == named(read_metrics(paths.metrics))
        and len(read_metrics(paths.metrics)) == 2
    )


def test_a_step_of_which_a_killed_run_has_recorded_a_part_is_completed(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", ON[1])
    paths = run_paths(config)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        for step in (1, 2):
            writer.write(step, metrics(step))
    for key in ("reward/mean", "time/step"):  # killed between the files
        (file,) = paths.mlflow.glob(f"*/*/metrics/{key}")
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]))
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.truncate_after(2)
        writer.write(3, metrics(3))
    assert (
        mlflow_steps(paths) == named(read_metrics(paths.metrics))
        and len(read_metrics(paths.metrics)) == 3
    )


def in_tensorboard(step: int, more: float = 0.0) -> dict[str, float]:
    """Metrics that 32 bits hold."""
    return {"reward/mean": step + more, "policy/loss": -0.5}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# of TensorBoard's own thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_event_files_that_cannot_be_written_for_a_while_get_every_step_once(tmp_path: Path) -> None:
    paths = run_paths(configured(tmp_path / "run"))
    away = paths.root / "away"
    sink = BackgroundSink(
        "tensorboard",
        lambda: TensorBoardSink(paths.tensorboard),
        lambda: read_metrics(paths.metrics),
        retry_s=0.0,
    )
    with MetricsWriter(paths, [sink]) as writer:
        writer.truncate_after(0)
        for step in (0, 1, 2):
            writer.write(step, in_tensorboard(step))
        wait_until(lambda: paths.tensorboard.exists() and tensorboard_writes(paths) == [0, 1, 2])
        time.sleep(1.1)  # the files of one second are read in an order of their own
        paths.tensorboard.rename(away)
        paths.tensorboard.write_text("in the way")
        for step in (3, 4, 5):
            writer.write(step, in_tensorboard(step))
        wait_until(lambda: sink.failures >= 2)
        paths.tensorboard.unlink()
        away.rename(paths.tensorboard)
        for step in (6, 7):
            writer.write(step, in_tensorboard(step))
    assert (
        tensorboard_steps(paths) == read_metrics(paths.metrics)
        and len(read_metrics(paths.metrics)) == 8
    )
    assert tensorboard_writes(paths) == [*range(8)]


def test_event_files_that_were_away_when_the_run_was_resumed_hide_what_came_later_before(
    tmp_path: Path,
) -> None:
    paths = run_paths(configured(tmp_path / "run"))
    with MetricsWriter(paths, [TensorBoardSink(paths.tensorboard)]) as writer:
        for step in range(1, 6):
            writer.write(step, in_tensorboard(step))
    time.sleep(1.1)
    is_back = threading.Event()

    def open_sink() -> MetricsSink:
        if not is_back.is_set():
            raise OSError("away")
        return TensorBoardSink(paths.tensorboard)

    sink = BackgroundSink(
        "tensorboard", open_sink, lambda: read_metrics(paths.metrics), retry_s=0.0
    )
    with MetricsWriter(paths, [sink]) as writer:
        writer.truncate_after(2)
        for step in (3, 4):
            writer.write(step, in_tensorboard(step, more=0.5))
        wait_until(lambda: sink.failures == 3)
        is_back.set()
    assert (
        tensorboard_steps(paths) == read_metrics(paths.metrics)
        and len(read_metrics(paths.metrics)) == 4
    )
    assert tensorboard_writes(paths) == [1, 2, 3, 4, 5, 3, 4]


def test_a_resumed_run_gives_tensorboard_what_the_attempts_before_could_not(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "logging.tensorboard=true")
    paths = run_paths(config)
    with MetricsWriter(paths) as writer:
        for step in range(1, 6):
            writer.write(step, in_tensorboard(step))
    before = TensorBoardSink(paths.tensorboard)
    for step in (1, 2, 5):  # not 3 and 4
        before.write(step, in_tensorboard(step))
    before.close(failed=True)
    (file,) = paths.tensorboard.iterdir()
    with file.open("ab") as end:
        end.write(b"\x10\x00")  # of a record that was being written at the end
    time.sleep(1.1)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.truncate_after(4)
        writer.write(5, in_tensorboard(5, more=0.5))
    assert (
        tensorboard_steps(paths) == read_metrics(paths.metrics)
        and len(read_metrics(paths.metrics)) == 5
    )
    assert tensorboard_writes(paths) == [1, 2, 5, 3, 4, 5]


class Silent:
    """A server that does not answer."""

    def write(self, step: int, record: Record) -> None:
        time.sleep(60)

    def resume(self, kept: list[Record]) -> None:
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        raise NotImplementedError


class Broken(Silent):
    """A server that refuses everything."""

    def write(self, step: int, record: Record) -> None:
        raise OSError("refused")


@pytest.mark.parametrize(("kind", "failures"), [(Silent, 0), (Broken, 2)])
def test_a_store_that_never_takes_anything_is_given_up_at_the_end_and_said_to_lack_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[MetricsSink], failures: int
) -> None:
    sink = BackgroundSink("mlflow", kind, list, close_timeout_s=0.5)
    started = time.monotonic()
    with MetricsWriter(RunPaths(tmp_path / "run"), [sink]) as writer:
        for step in range(1, 2000):
            writer.write(step, metrics(step))
    assert time.monotonic() - started < 10
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1999
    assert (
        caplog.messages[-1]
        == f"mlflow failed {failures} times and is missing steps; metrics.jsonl has all steps"
    )


def test_a_tracker_that_is_off_is_not_imported() -> None:
    program = (
        "import sys; from aligner.schema import Config; from aligner.paths import RunPaths\nfrom"
        " pathlib import Path; from aligner.observability.sinks import open_sinks; config ="
        " Config()\nconfig.logging.tensorboard = False; assert open_sinks(config,"
        " RunPaths(Path('run'))) == []\nprint([name for name in ('wandb', 'mlflow', 'tensorboard')"
        " if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
