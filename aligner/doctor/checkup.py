"""All checks of `aligner doctor`."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from aligner.doctor.devices import check_gpus, check_nccl
from aligner.doctor.finding import WARNING, Finding
from aligner.doctor.resources import (
    check_huge_pages,
    check_limits,
    check_network,
    check_processors_and_memory,
    check_shared_memory,
)
from aligner.doctor.software import (
    check_compiler,
    check_containers,
    check_gpu_libraries,
    check_packages,
    check_python,
    check_sandbox,
    check_shared_libpython,
    check_slurm,
    check_triton,
    check_vllm,
)
from aligner.doctor.storage import check_clock, check_storage

Check = Callable[[], Iterator[Finding]]
"""A check of the machine, which yields its findings."""


def list_checks(runs: Path) -> tuple[Check, ...]:
    """Return all checks in the order of their output.

    Args:
        runs: Directory of the runs.
    """
    return (
        check_python,
        check_shared_libpython,
        check_packages,
        check_triton,
        check_processors_and_memory,
        check_gpus,
        check_nccl,
        check_gpu_libraries,
        check_compiler,
        check_shared_memory,
        check_limits,
        check_huge_pages,
        check_network,
        partial(check_storage, runs),
        check_clock,
        check_sandbox,
        check_containers,
        check_vllm,
        check_slurm,
    )


def run_checks(runs: Path) -> list[Finding]:
    """Run all checks at the same time, and return their findings.

    Args:
        runs: Directory of the runs.
    """
    checks = list_checks(runs)
    # Most of the checks wait for programs.
    with ThreadPoolExecutor(len(checks)) as pool:
        return [finding for findings in pool.map(_run_check, checks) for finding in findings]


def _run_check(check: Check) -> list[Finding]:
    try:
        return list(check())
    # A check reads files of unknown kernels and containers; its error must not hide the others.
    except Exception as error:
        function = check.func if isinstance(check, partial) else check
        name = function.__name__.removeprefix("check_").replace("_", " ")
        return [Finding(name, WARNING, f"could not be checked: {type(error).__name__}: {error}")]
