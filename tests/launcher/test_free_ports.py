"""Tests of the reservation of free ports on a machine."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys

import pytest

from aligner.errors import AlignerError
from aligner.launcher.rank_environment import FreePorts

_CLAIMS = (
    "from aligner.launcher.rank_environment import FreePorts; ports = FreePorts(candidates=[{}]);"
    " print(next(ports)); input()"
)


def pick(count: int) -> list[int]:
    with FreePorts() as ports:
        return list(itertools.islice(ports, count))


def is_free(port: int) -> bool:
    with FreePorts(candidates=[port]) as ports:
        try:
            return next(ports) == port
        except AlignerError as error:
            assert str(error) == "no free port left on 127.0.0.1"
            return False


def test_port_is_reserved_until_it_is_released() -> None:
    with FreePorts() as ports:
        port = next(ports)
        assert not is_free(port)
    assert is_free(port)


def test_port_of_killed_process_is_free_again() -> None:
    (port,) = pick(1)
    command = [sys.executable, "-uc", _CLAIMS.format(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == f"{port}\n"
            assert not is_free(port)
        finally:
            other.kill()
    assert is_free(port)


def test_port_in_use_is_not_reserved() -> None:
    used_port, free = pick(2)
    with (
        socket.create_server(("127.0.0.1", used_port)),
        FreePorts(candidates=[used_port, free]) as ports,
    ):
        assert next(ports) == free
        with pytest.raises(AlignerError):
            next(ports)


def test_address_of_another_machine_raises_os_error() -> None:
    with (
        FreePorts(["192.0.2.1"]) as ports,
        pytest.raises(OSError, match="Cannot assign requested address"),
    ):
        next(ports)
