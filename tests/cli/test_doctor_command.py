"""Tests of `aligner doctor` on machines with real lacks: limits, a full disk, missing programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.small_disk import small_disk

LEVELS = {"ok", "note", "warning", "error"}


def diagnose(
    *options: str, code: int = 0, before: str = "", **environment: str
) -> dict[str, list[dict[str, Any]]]:
    """Return the findings of `aligner doctor` by subject; `before` is a shell command."""
    command = 'exec "$0" -m aligner doctor --json "$@"'
    result = subprocess.run(
        ["bash", "-c", f"{before}\n{command}", sys.executable, *options],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == code, result.stderr
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(result.stdout):
        findings.setdefault(finding["subject"], []).append(finding)
    return findings


def get_finding(findings: dict[str, list[dict[str, Any]]], subject: str) -> tuple[str, str, str]:
    (finding,) = findings[subject]
    return finding["level"], finding["found"], finding["remedy"] or ""


def test_every_problem_has_an_explanation_and_a_remedy(tmp_path: Path) -> None:
    findings = diagnose("--runs", str(tmp_path / "runs"))
    entries = [finding for entries in findings.values() for finding in entries]
    assert {finding["level"] for finding in entries} <= LEVELS
    assert not [entry for entry in entries if "could not be checked" in entry["found"]]
    for entry in entries:
        assert entry["remedy"] if entry["level"] in ("warning", "error") else True, entry
    for subject in ("Python", "packages", "Triton", "memory", "shared memory", "network", "runs"):
        assert subject in findings
    assert get_finding(findings, "Python")[1].startswith(".".join(map(str, sys.version_info[:3])))
    assert list(tmp_path.iterdir()) == []


def test_text_ends_with_number_of_problems(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aligner", "doctor", "--runs", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok       Python  ")
    assert lines[-1].startswith("0 errors, ")


def test_low_limits_are_warnings(tmp_path: Path) -> None:
    findings = diagnose(
        "--runs", str(tmp_path), before="ulimit -S -n 256; ulimit -f 1000000; ulimit -v 60000000"
    )
    level, found, remedy = get_finding(findings, "open files")
    assert level == "warning" and "256 open files" in found and "ulimit -n 65536" in remedy
    assert get_finding(findings, "file size")[2] == "ulimit -f unlimited"
    assert get_finding(findings, "address space")[2] == "ulimit -v unlimited"
    assert "limits" not in findings


def test_unknown_network_interface_is_an_error(tmp_path: Path) -> None:
    findings = diagnose("--runs", str(tmp_path), code=1, NCCL_SOCKET_IFNAME="nosuch0")
    assert get_finding(findings, "NCCL")[:2][0] == "error"
    assert "NCCL_SOCKET_IFNAME=nosuch0" in findings["NCCL"][0]["found"]
    assert "NCCL" not in diagnose("--runs", str(tmp_path), NCCL_SOCKET_IFNAME="lo")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a driver")
def test_gpus_without_driver_are_an_error(tmp_path: Path) -> None:
    findings = diagnose("--runs", str(tmp_path), code=1, ALIGNER_GPUS="2")
    level, found, remedy = get_finding(findings, "GPUs")
    assert level == "error" and "nvidia-smi fails" in found and "--gpus all" in remedy


def test_missing_programs_are_named(tmp_path: Path) -> None:
    findings = diagnose(
        "--runs",
        str(tmp_path),
        before='PATH="$EMPTY"',
        EMPTY=str(tmp_path),
        ALIGNER_CACHE=str(tmp_path),
    )
    assert get_finding(findings, "Slurm")[0] == "note"
    assert get_finding(findings, "vLLM")[2] == "aligner install-vllm"
    assert "install podman" in get_finding(findings, "containers")[2]
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    findings = diagnose("--runs", str(tmp_path), before='PATH="$EMPTY"', EMPTY=str(tmp_path))
    level, found, _ = get_finding(findings, "Slurm")
    assert level == "warning" and found.startswith("srun, squeue, scancel, scontrol: not found")


def test_full_and_read_only_disks_are_errors(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        findings = diagnose("--runs", str(disk.directory / "runs"), code=1)
        level, found, remedy = get_finding(findings, "runs")
        assert level == "error" and "no run fits" in found and "run.dir=DIRECTORY" in remedy
        subprocess.run(["mount", "-o", "remount,ro", str(disk.directory)], check=True)
        findings = diagnose("--runs", str(disk.directory / "runs"), code=1)
        assert "is a read-only file system" in get_finding(findings, "runs")[1]


def test_small_shared_memory_is_a_warning(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    probe = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False
    )
    if probe.returncode:
        pytest.skip("this process may not mount file systems in a namespace of its own")
    script = f'{mount} && exec "$0" -m aligner doctor --json --runs "$1"'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    (finding,) = [
        entry for entry in json.loads(result.stdout) if entry["subject"] == "shared memory"
    ]
    assert finding["level"] == "warning" and "has 64.0 MiB" in finding["found"]
    assert "--shm-size=8g" in finding["remedy"]
