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
)
from aligner.exit_codes import error_of, exit_code, is_stopped


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
def test_every_end_has_its_code(error: BaseException | None, code: int) -> None:
    assert exit_code(error) == code
    assert is_stopped(code) == (code in (75, 130, 143))


def test_an_error_that_an_interrupt_caused_has_the_interrupts_code() -> None:
    with pytest.raises(AlignerError) as raised:
        raise AlignerError("interrupted: the job may be queued") from KeyboardInterrupt()
    assert exit_code(raised.value) == 130


@pytest.mark.parametrize("code", [1, 2, 75, 130, 143])
def test_a_code_stands_for_an_error_that_has_it(code: int) -> None:
    error = error_of(code, "why")
    assert exit_code(error) == code and ("why" in str(error) or isinstance(error, Interrupted))


def test_a_child_that_a_signal_ended_was_interrupted() -> None:
    assert exit_code(error_of(-signal.SIGKILL, "")) == 137
