"""Size limits of logs, and readers of logs that are shortened while processes write to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.launcher.failure import read_log_tail
from aligner.observability.log_files import LogFollower, LogLimit, count_output_bytes

# Prints a block of numbered lines at the start, and another one for each line of its input.
PRINTS_BLOCKS = """
for first in range(0, 90_000, 30_000):
    for number in range(first, first + 30_000):
        print(f"{number:06d} {'x' * 32}")
    print(end="", flush=True)
    input()
"""
LINE_BYTES = 40
BLOCK_BYTES = 30_000 * LINE_BYTES


def read_header(log: Path) -> str:
    return log.read_text().splitlines()[0]


def read_numbers(log: Path) -> list[int]:
    return [int(line.split()[0]) for line in log.read_text().splitlines()[1:]]


def write_lines(log: Path, first: int, end: int) -> None:
    with log.open("a") as lines:
        lines.writelines(f"{number:06d} {'x' * 32}\n" for number in range(first, end))


def test_shortened_log_keeps_later_output_of_its_process(tmp_path: Path) -> None:
    log = tmp_path / "reward-0.log"
    limit = LogLimit(tmp_path, 1, "text")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PRINTS_BLOCKS], stdin=subprocess.PIPE, stdout=output
        )
    assert process.stdin is not None
    try:
        for block in (1, 2, 3):
            while count_output_bytes(log) < block * BLOCK_BYTES:
                assert process.poll() is None
            limit.enforce()
            assert log.stat().st_size < 1 << 20
            assert count_output_bytes(log) == block * BLOCK_BYTES
            numbers = read_numbers(log)
            assert numbers == list(range(numbers[0], block * 30_000))
            assert len(numbers) * LINE_BYTES == pytest.approx(1 << 19, abs=LINE_BYTES)
            assert f" {numbers[0] * LINE_BYTES} bytes of older output were dropped" in read_header(
                log
            )
            process.stdin.write(b"\n")
            process.stdin.flush()
    finally:
        process.kill()
        process.wait()


def test_smaller_log_is_unchanged(tmp_path: Path) -> None:
    log = tmp_path / "reward-0.log"
    log.write_bytes(b"x" * (1 << 20))
    LogLimit(tmp_path, 1, "text").enforce()
    LogLimit(tmp_path / "missing", 1, "text").enforce()
    assert log.read_bytes() == b"x" * (1 << 20)


def test_end_of_line_that_is_longer_than_limit_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "reward-0.log"
    log.write_bytes(b"x" * (3 << 20) + b"end\n")
    LogLimit(tmp_path, 1, "text").enforce()
    assert log.stat().st_size < 1 << 20 and log.read_text().endswith("xend\n")
    assert f" {count_output_bytes(log) - (1 << 19)} bytes" in read_header(log)


def test_json_log_remains_json(tmp_path: Path) -> None:
    log = tmp_path / "reward.1-2.log"
    log.write_text(json.dumps({"message": "x" * 100}) + "\n" + '{"message": "last"}\n' * 100_000)
    LogLimit(tmp_path, 1, "json").enforce()
    header, *records = [json.loads(line) for line in log.read_text().splitlines()]
    assert (header["role"], header["rank"]) == ("reward.1", 2)
    assert header["message"].endswith("because this log exceeded logging.file_mib=1")
    assert {record["message"] for record in records} == {"last"}


def test_tritons_log_is_shortened_and_sruns_is_not(tmp_path: Path) -> None:
    for name in ("reward-triton.log", "srun-7-0-reward-1.log", "job-7.log"):
        (tmp_path / name).write_bytes(b"line\n" * 300_000)
    LogLimit(tmp_path, 1, "json").enforce()
    assert read_header(tmp_path / "reward-triton.log").startswith("--- ")
    assert {file.name for file in tmp_path.iterdir() if file.stat().st_size > 1 << 20} == {
        "srun-7-0-reward-1.log",
        "job-7.log",
    }


def test_tail_of_a_restarted_rank_excludes_earlier_output(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    write_lines(log, 0, 30_000)
    LogLimit(tmp_path, 1, "text").enforce()
    start = count_output_bytes(log)
    write_lines(log, 30_000, 30_002)
    assert [line[:6] for line in read_log_tail(log, start=start)] == ["030000", "030001"]
    # Also after the earlier output was dropped, and after the beginning of the later output was.
    for first, end in ((30_002, 50_000), (50_000, 70_000)):
        write_lines(log, first, end)
        LogLimit(tmp_path, 1, "text").enforce()
        assert read_log_tail(log, lines=1, start=start)[0][:6] == f"{end - 1:06d}"
        assert read_log_tail(log, lines=1, start=count_output_bytes(log)) == []


def test_follower_returns_each_line_of_shortened_log_once(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    write_lines(log, 0, 10)
    follower = LogFollower(tmp_path)
    write_lines(log, 10, 20)
    assert [line[:6] for _, line in follower.read_new_lines()] == [
        f"{number:06d}" for number in range(10, 20)
    ]
    write_lines(log, 20, 30_000)
    assert len(follower.read_new_lines()) == 30_000 - 20
    LogLimit(tmp_path, 1, "text").enforce()
    assert follower.read_new_lines() == []
    write_lines(log, 30_000, 30_001)
    assert [(name, line[:6]) for name, line in follower.read_new_lines()] == [
        ("trainer-0", "030000")
    ]
