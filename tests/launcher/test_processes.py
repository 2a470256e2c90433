"""Processes of this machine as the launcher sees them."""

from __future__ import annotations

import subprocess
import time

import pytest

from aligner.launcher import processes


def test_wait_ends_when_a_child_exits():
    began = time.monotonic()
    child = subprocess.Popen(["sleep", "0.2"])

    processes._wait_for_exit([child.pid], timeout_s=30)

    assert child.wait(timeout=0.1) == 0
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("has_child", [False, True])
def test_wait_ends_at_its_timeout(has_child):
    began = time.monotonic()
    child = subprocess.Popen(["sleep", "60"]) if has_child else None

    processes._wait_for_exit([child.pid] if child else [], timeout_s=0.05)

    assert time.monotonic() - began >= 0.04
    if child:
        child.kill()
        child.wait()
