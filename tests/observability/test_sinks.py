"""Metrics in Weights & Biases, MLflow and TensorBoard, without a network."""

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
    SUPERSEDED_DIRECTORY,
    BackgroundSink,
    MlflowSink,
    TensorBoardSink,
    open_sinks,
)
from aligner.paths import RunPaths, get_run_paths
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
    # The sink sets this variable too; the reader in this process needs it.
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


def with_mlflow_names(steps: Steps) -> Steps:
    """Return metrics under their names in MLflow, which does not permit @."""
    return [{key.replace("@", "_"): value for key, value in step.items()} for step in steps]


KILLED = """
import os, signal, sys, time
from aligner.config.compose import compose_config
from aligner.paths import get_run_paths
from aligner.observability.metrics import MetricsWriter
from aligner.observability.sinks import open_sinks
from tests.observability.test_sinks import metrics
config = compose_config(sys.argv[2:])
writer = MetricsWriter(get_run_paths(config), open_sinks(config, get_run_paths(config)))
writer.truncate_after(0)
for step in range(int(sys.argv[1])):
    writer.write(step, metrics(step))
paths = get_run_paths(config)
while not [f for f in paths.mlflow.glob("*/*/metrics/policy/loss") if f.read_text().count("\\n") == 6]:
    time.sleep(0.05)
while not paths.tracker_run("wandb").exists() or not [*paths.wandb.glob("offline-run-*/*.wandb")]:
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.promise("trackers-equal-metrics-file")
@pytest.mark.slow
def test_trackers_of_resumed_run_equal_metrics_file(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", *ON)
    paths = get_run_paths(config)
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
    assert mlflow_steps(paths) == with_mlflow_names(expected)
    assert {name: paths.tracker_run(name).read_text() for name in ids} == ids
    run = mlflow_client(paths).get_run(paths.tracker_run("mlflow").read_text())
    assert (run.info.status, run.info.run_name, run.data.params["rollout.prompts_per_step"]) == (
        "FINISHED",
        "run",
        "16",
    )


def test_tracked_run_has_tags_configuration_and_status(tmp_path: Path) -> None:
    config = configured(
        tmp_path / "run", *ON, "logging.wandb.tags=[a,b]", "+logging.mlflow.tags.team=x"
    )
    paths = get_run_paths(config)
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


TERMINATED = """
import sys, time
from aligner.config.compose import compose_config
from aligner.paths import get_run_paths
from aligner.observability.metrics import MetricsWriter, recording
from aligner.observability.sinks import open_sinks
from tests.observability.test_sinks import metrics
config = compose_config(sys.argv[1:])
writer = MetricsWriter(get_run_paths(config), open_sinks(config, get_run_paths(config)))
with recording(writer, config.logging):
    for step in (1, 2, 3):
        writer.write(step, metrics(step))
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_terminated_run_leaves_all_steps_in_trackers(tmp_path: Path) -> None:
    paths = get_run_paths(configured(tmp_path / "run"))
    overrides = ["experiment=tiny_ppo", f"run.dir={paths.root}", "logging.tensorboard=false", *ON]
    command = [sys.executable, "-c", TERMINATED, *overrides]
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
    assert mlflow_steps(paths) == with_mlflow_names(read_metrics(paths.metrics))
    assert (
        mlflow_client(paths).get_run(paths.tracker_run("mlflow").read_text()).info.status
        == "FAILED"
    )


def test_offline_wandb_run_is_superseded_on_resume(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path / "run", ON[0])
    paths = get_run_paths(config)
    for first in (0, 2):
        with MetricsWriter(paths, open_sinks(config, paths)) as writer:
            writer.truncate_after(first)
            for step in range(first + 1, first + 4):
                writer.write(step, metrics(step))
    assert (
        len(list(paths.wandb.glob("offline-run-*")))
        == len(list((paths.wandb / SUPERSEDED_DIRECTORY).iterdir()))
        == 1
    )
    assert wandb_steps(paths) == read_metrics(paths.metrics)


def test_recovered_mlflow_store_gets_all_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tmp_path / "run", ON[1])
    paths = get_run_paths(config)
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
        mlflow_steps(paths) == with_mlflow_names(read_metrics(paths.metrics))
        and len(read_metrics(paths.metrics)) == 4
    )
    (message,) = [
        record.getMessage()
        for record in caplog.records
        if record.name == "aligner.observability.sinks"
    ]
    assert message.startswith(
        "mlflow cannot record metrics; the run continues and tries again later: "
    )


def test_mlflow_unavailable_at_resume_drops_superseded_steps(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path / "run", ON[1])
    paths = get_run_paths(config)
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
        mlflow_steps(paths) == with_mlflow_names(read_metrics(paths.metrics))
        and len(read_metrics(paths.metrics)) == 4
    )


def test_mlflow_run_with_empty_file_is_resumed(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", ON[1])
    paths = get_run_paths(config)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.write(1, metrics(1))
    begun = paths.tracker_run("mlflow").read_text()
    (description,) = paths.mlflow.glob(f"*/{begun}/meta.yaml")
    description.write_text("")  # the store truncates the file before it writes
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.truncate_after(1)
        writer.write(2, metrics(2))
    run = mlflow_client(paths).get_run(begun)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (
        mlflow_steps(paths) == with_mlflow_names(read_metrics(paths.metrics))
        and len(read_metrics(paths.metrics)) == 2
    )


def test_partial_mlflow_step_is_completed_on_resume(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", ON[1])
    paths = get_run_paths(config)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        for step in (1, 2):
            writer.write(step, metrics(step))
    for key in ("reward/mean", "time/step"):  # killed between the writes of two metrics
        (file,) = paths.mlflow.glob(f"*/*/metrics/{key}")
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]))
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.truncate_after(2)
        writer.write(3, metrics(3))
    assert (
        mlflow_steps(paths) == with_mlflow_names(read_metrics(paths.metrics))
        and len(read_metrics(paths.metrics)) == 3
    )


def float32_metrics(step: int, more: float = 0.0) -> dict[str, float]:
    """Return metrics that are exact in 32 bits."""
    return {"reward/mean": step + more, "policy/loss": -0.5}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# The warning is from TensorBoard's own thread.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_recovered_tensorboard_gets_each_step_once(tmp_path: Path) -> None:
    paths = get_run_paths(configured(tmp_path / "run"))
    away = paths.root / "away"
    directory_is_complete = threading.Lock()

    def open_sink() -> TensorBoardSink:
        with directory_is_complete:
            return TensorBoardSink(paths.tensorboard)

    sink = BackgroundSink(
        "tensorboard", open_sink, lambda: read_metrics(paths.metrics), retry_s=0.0
    )
    with MetricsWriter(paths, [sink]) as writer:
        writer.truncate_after(0)
        for step in (0, 1, 2):
            writer.write(step, float32_metrics(step))
        wait_until(lambda: paths.tensorboard.exists() and tensorboard_writes(paths) == [0, 1, 2])
        time.sleep(1.1)  # files created in the same second are read in arbitrary order
        paths.tensorboard.rename(away)
        paths.tensorboard.write_text("in the way")
        for step in (3, 4, 5):
            writer.write(step, float32_metrics(step))
        wait_until(lambda: sink.failures >= 2)
        with directory_is_complete:  # a third attempt would begin a new directory in between
            paths.tensorboard.unlink()
            away.rename(paths.tensorboard)
        for step in (6, 7):
            writer.write(step, float32_metrics(step))
    assert (
        tensorboard_steps(paths) == read_metrics(paths.metrics)
        and len(read_metrics(paths.metrics)) == 8
    )
    assert tensorboard_writes(paths) == [*range(8)]


def test_tensorboard_unavailable_at_resume_hides_old_steps(
    tmp_path: Path,
) -> None:
    paths = get_run_paths(configured(tmp_path / "run"))
    with MetricsWriter(paths, [TensorBoardSink(paths.tensorboard)]) as writer:
        for step in range(1, 6):
            writer.write(step, float32_metrics(step))
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
            writer.write(step, float32_metrics(step, more=0.5))
        wait_until(lambda: sink.failures == 3)
        is_back.set()
    assert (
        tensorboard_steps(paths) == read_metrics(paths.metrics)
        and len(read_metrics(paths.metrics)) == 4
    )
    assert tensorboard_writes(paths) == [1, 2, 3, 4, 5, 3, 4]


def test_resume_writes_missing_steps_to_tensorboard(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "logging.tensorboard=true")
    paths = get_run_paths(config)
    with MetricsWriter(paths) as writer:
        for step in range(1, 6):
            writer.write(step, float32_metrics(step))
    before = TensorBoardSink(paths.tensorboard)
    for step in (1, 2, 5):  # not 3 and 4
        before.write(step, float32_metrics(step))
    before.close(failed=True)
    (file,) = paths.tensorboard.iterdir()
    with file.open("ab") as end:
        end.write(b"\x10\x00")  # an incomplete record at the end of the file
    time.sleep(1.1)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.truncate_after(4)
        writer.write(5, float32_metrics(5, more=0.5))
    assert (
        tensorboard_steps(paths) == read_metrics(paths.metrics)
        and len(read_metrics(paths.metrics)) == 5
    )
    assert tensorboard_writes(paths) == [1, 2, 5, 3, 4, 5]


class Silent:
    """A server that does not respond."""

    def write(self, step: int, record: Record) -> None:
        time.sleep(60)

    def resume(self, records: list[Record]) -> None:
        time.sleep(60)

    def close(self, failed: bool) -> None:
        time.sleep(60)


class Broken:
    """A server that refuses all requests."""

    def write(self, step: int, record: Record) -> None:
        raise OSError("refused")

    def resume(self, records: list[Record]) -> None:
        raise OSError("refused")

    def close(self, failed: bool) -> None:
        raise OSError("refused")


@pytest.mark.parametrize(("kind", "failures"), [(Silent, 0), (Broken, 2)])
def test_unavailable_tracker_does_not_block_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[MetricsSink], failures: int
) -> None:
    sink = BackgroundSink("mlflow", kind, list, close_timeout_s=0.5)
    started = time.monotonic()
    for step in range(1, 2000):  # more than the queue holds
        sink.write(step, metrics(step))
    with MetricsWriter(RunPaths(tmp_path / "run"), [sink]) as writer:
        writer.write(2000, metrics(2000))
    assert time.monotonic() - started < 10
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [2000]
    assert (
        caplog.messages[-1]
        == f"mlflow failed {failures} times and is missing steps; metrics.jsonl has all steps"
    )


def test_disabled_trackers_are_not_imported() -> None:
    program = (
        "import sys; from aligner.schema import Config; from aligner.paths import RunPaths\nfrom"
        " pathlib import Path; from aligner.observability.sinks import open_sinks; config ="
        " Config()\nconfig.logging.tensorboard = False; assert open_sinks(config,"
        " RunPaths(Path('run'))) == []\nprint([name for name in ('wandb', 'mlflow', 'tensorboard')"
        " if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
