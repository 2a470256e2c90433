"""The metrics file: steps, resumes, amendments, followers and the checksum."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import xxhash
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aligner.errors import AlignerError
from aligner.observability.metrics import (
    FileFollower,
    MetricsWriter,
    RecordWriter,
    RunningChecksum,
    read_metrics,
    read_records,
)
from aligner.observability.sinks import TensorBoardSink
from aligner.paths import RunPaths


def test_step_is_one_json_line_written_immediately(tmp_path: Path) -> None:
    writer = MetricsWriter(RunPaths(tmp_path / "run"))
    writer.write(1, {"reward/mean": 1, "policy/loss": -0.5})
    assert (
        tmp_path / "run" / "metrics.jsonl"
    ).read_text() == '{"step": 1, "reward/mean": 1.0, "policy/loss": -0.5}\n'
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_metric_is_refused(tmp_path: Path, value: float) -> None:
    writer = MetricsWriter(RunPaths(tmp_path))
    with pytest.raises(AlignerError, match=f"step 3: metric policy/loss is {value}"):
        writer.write(3, {"reward/mean": 1.0, "policy/loss": value})
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_resume_drops_later_and_unfinished_steps(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths)
    for step in range(1, 5):
        writer.write(step, {"reward/mean": step})
    with paths.metrics.open("a") as file:
        file.write('{"step": 5, "rewa')
    writer.truncate_after(2)
    writer.write(3, {"reward/mean": 30})
    assert [(record["step"], record["reward/mean"]) for record in read_metrics(paths.metrics)] == [
        (1, 1),
        (2, 2),
        (3, 30),
    ]


@pytest.mark.parametrize(
    "line", ["\0" * 40, '{"step": 3, "rewa', "3", "[]", '{"reward/mean": 1.0}', '{"step": "3"}']
)
def test_malformed_metrics_line_is_reported(tmp_path: Path, line: str) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths)
    for step in (1, 2):
        writer.write(step, {"reward/mean": step})
    content = f"{paths.metrics.read_text()}{line}\n"
    paths.metrics.write_text(content)
    for read in (lambda: read_metrics(paths.metrics), lambda: writer.truncate_after(3)):
        with pytest.raises(
            AlignerError,
            match=f"{paths.metrics}: line 3 is not a JSON object with a step; remove the line",
        ):
            read()
    assert paths.metrics.read_text() == content
    writer.truncate_after(1)
    assert [record["step"] for record in read_metrics(paths.metrics)] == [1]


def test_amended_step_reaches_sinks_only_once(tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.seen: list[tuple[int, dict[str, float]]] = []

        def write(self, step: int, record: Mapping[str, float]) -> None:
            self.seen.append((step, dict(record)))

        def resume(self, records: Sequence[Mapping[str, float]]) -> None:
            self.seen = [(int(record["step"]), {}) for record in records]

        def close(self, failed: bool) -> None: ...

    paths, sink = RunPaths(tmp_path), Sink()
    writer = MetricsWriter(paths, [sink])  # type: ignore[list-item]
    for step in range(1, 4):
        writer.write(step, {"reward/mean": step})
    writer.truncate_after(2, amends=True)
    assert [record["step"] for record in read_metrics(paths.metrics)] == [1, 2]
    with pytest.raises(AlignerError, match="step 2: metric eval/loss is nan"):
        writer.amend(2, {"eval/loss": float("nan")})
    writer.amend(2, {"eval/loss": 0.5})
    writer.write(3, {"reward/mean": 30})
    whole = {"reward/mean": 2.0, "eval/loss": 0.5}
    assert read_metrics(paths.metrics) == [
        {"step": 1, "reward/mean": 1},
        {"step": 2, **whole},
        {"step": 3, "reward/mean": 30},
    ]
    assert sink.seen == [(1, {}), (2, whole), (3, {"reward/mean": 30})]
    # The amended step is appended, so that offsets of followers stay valid.
    assert len(paths.metrics.read_text().splitlines()) == 4


def test_resume_drops_later_samples(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = RecordWriter(paths.samples)
    writer.truncate_after(0)
    for step in (1, 1, 2):
        writer.write(step, [{"prompt": "p", "response": "ü\n", "reward": 0.5, "sample_index": 3}])
    writer.truncate_after(1)
    expected = {"step": 1, "prompt": "p", "response": "ü\n", "reward": 0.5, "sample_index": 3}
    assert read_records(paths.samples) == [expected, expected]


def test_tensorboard_hides_repeated_steps(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths, [TensorBoardSink(paths.tensorboard)])
    for step in range(1, 4):
        writer.write(step, {"reward/mean": step})
    writer.truncate_after(1)
    writer.write(2, {"reward/mean": 20})
    writer.close()
    events = EventAccumulator(str(paths.tensorboard))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 1.0),
        (2, 20.0),
    ]


def test_follower_handles_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = FileFollower(path)
    assert follower.read_new_records() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert follower.read_new_records() == [{"step": 1}, {"step": 2}]
    assert follower.read_new_records() == []
    path.write_text('{"step": 1}\n')
    assert follower.read_new_records() == []
    with path.open("a") as file:
        file.write(json.dumps({"step": 2, "again": True}) + "\n")
    assert follower.read_new_records() == [{"step": 2, "again": True}]


def test_follower_with_0_bytes_starts_at_file_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    follower = FileFollower(path, newest_bytes=0)
    with path.open("a") as file:
        file.write('{"step": 2}\n')
    assert follower.read_new_records() == [{"step": 2}]


def test_tensorboard_sink_does_not_import_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from aligner.paths import RunPaths\nfrom"
        " aligner.observability.metrics import MetricsWriter\nfrom aligner.observability.sinks"
        " import TensorBoardSink; paths = RunPaths(Path(sys.argv[1]))\nwith MetricsWriter(paths,"
        " [TensorBoardSink(paths.tensorboard)]) as writer: writer.write(1, {'a': 1})\nprint([name"
        " for name in ('torch', 'tensorflow') if name in sys.modules])"
    )
    assert (
        subprocess.check_output([sys.executable, "-c", program, str(tmp_path)], text=True).strip()
        == "[]"
    )


def flip_bit(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def write_metrics(directory: Path, steps: int = 3) -> RunPaths:
    paths = RunPaths(directory)
    writer = MetricsWriter(paths)
    for step in range(1, steps + 1):
        writer.write(step, {"reward/mean": step})
    return paths


def test_metrics_checksum_covers_the_whole_file(tmp_path: Path) -> None:
    paths = write_metrics(tmp_path)
    content = paths.metrics.read_bytes()
    expected = f"{len(content)} {xxhash.xxh3_64_hexdigest(content)}\n"
    assert (tmp_path / "metrics.jsonl.checksum").read_text() == expected


@pytest.mark.promise("changed-inputs-refuse-a-resume")
def test_resume_refuses_metrics_with_a_changed_digit(tmp_path: Path) -> None:
    paths = write_metrics(tmp_path)
    flip_bit(paths.metrics, paths.metrics.read_bytes().index(b"2.0"))
    before = paths.metrics.read_bytes()
    with pytest.raises(AlignerError, match=r"metrics\.jsonl: damaged: its first \d+ bytes"):
        MetricsWriter(paths).truncate_after(3)
    assert paths.metrics.read_bytes() == before


def test_resume_refuses_metrics_that_lack_covered_steps(tmp_path: Path) -> None:
    paths = write_metrics(tmp_path)
    lines = paths.metrics.read_bytes().splitlines(keepends=True)
    paths.metrics.write_bytes(b"".join(lines[:2]))
    with pytest.raises(AlignerError, match=r"metrics\.jsonl: damaged: .* but it has \d+ bytes"):
        MetricsWriter(paths).truncate_after(2)


def test_resume_accepts_steps_after_the_checksum(tmp_path: Path) -> None:
    paths = write_metrics(tmp_path)
    with paths.metrics.open("ab") as file:
        file.write(b'{"step": 4, "reward/mean": 4.0}\n')
    writer = MetricsWriter(paths)
    writer.truncate_after(4)
    writer.write(5, {"reward/mean": 5})
    RunningChecksum(paths.metrics, paths.metrics_checksum).verify()
    assert [record["step"] for record in read_metrics(paths.metrics)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kept", [0, 2])
def test_checksum_after_resume_covers_kept_and_new_steps(tmp_path: Path, kept: int) -> None:
    paths = write_metrics(tmp_path)
    writer = MetricsWriter(paths)
    writer.truncate_after(kept)
    RunningChecksum(paths.metrics, paths.metrics_checksum).verify()
    writer.write(kept + 1, {"reward/mean": 9})
    RunningChecksum(paths.metrics, paths.metrics_checksum).verify()


def test_metrics_without_checksum_are_accepted(tmp_path: Path) -> None:
    paths = write_metrics(tmp_path)
    flip_bit(paths.metrics, paths.metrics.read_bytes().index(b"2.0"))
    paths.metrics_checksum.unlink()
    MetricsWriter(paths).truncate_after(3)
    RunningChecksum(paths.metrics, paths.metrics_checksum).verify()
