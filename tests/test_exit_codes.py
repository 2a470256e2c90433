"""Exit codes of errors and signals, and the errors that exit codes stand for."""

from __future__ import annotations

import signal

import pytest

from aligner.errors import (
    AlignerError,
    ConfigError,
    Interrupted,
    Stopped,
    TransientError,
    UnavailableError,
    build_exit_error,
    get_exit_code,
    is_stop_code,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (AlignerError("a rank failed"), 1),
        (UnavailableError("no answer"), 1),
        (OSError("no space left"), 1),
        (ConfigError("run.steps=0"), 2),
        (TransientError("Triton does not come up"), 75),
        (Stopped("told to stop"), 75),
        (Interrupted(signal.SIGTERM), 143),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_their_exit_codes(error: BaseException | None, code: int) -> None:
    assert get_exit_code(error) == code
    assert is_stop_code(code) == (code in (75, 130, 143))


def test_error_caused_by_interrupt_has_exit_code_130() -> None:
    with pytest.raises(AlignerError) as raised:
        raise AlignerError("interrupted: the job may be queued") from KeyboardInterrupt()
    assert get_exit_code(raised.value) == 130


@pytest.mark.parametrize("code", [1, 2, 75, 130, 143])
def test_error_of_an_exit_code_has_that_exit_code(code: int) -> None:
    error = build_exit_error(code, "why")
    assert get_exit_code(error) == code and ("why" in str(error) or isinstance(error, Interrupted))


def test_child_killed_by_signal_has_exit_code_137() -> None:
    assert get_exit_code(build_exit_error(-signal.SIGKILL, "")) == 137
