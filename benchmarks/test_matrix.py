"""Run a part of the tests with other releases of Python, megatron-core, numpy and transformers.

    python -m benchmarks.test_matrix                    # all combinations
    python -m benchmarks.test_matrix megatron-0.19      # one of them
    python -m benchmarks.test_matrix --page             # only write the page from stored results

Each combination gets an environment in the cache directory, which is deleted after its tests unless
`--keep` is set. The next call reuses a kept environment. An environment has up to 6 GB. The results
are stored in `test_matrix.json` beside this file, and docs/compatibility.md is written from them.

Where a combination cannot contain PyTriton, the servers of its run use the environment of this
interpreter (`server.python`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from aligner.files import write_file
from aligner.paths import get_cache_directory
from benchmarks.peer_environment import find_interpreter
from benchmarks.runs import REPOSITORY, run_of_interpreter

RESULTS = REPOSITORY / "benchmarks" / "test_matrix.json"
PAGE = REPOSITORY / "docs" / "compatibility.md"
_SHOWN_PACKAGES = ("torch", "megatron-core", "numpy", "transformers", "pyarrow", "nvidia-pytriton")
_TEST_PACKAGES = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "transformers>=5.17")
_CHECK_TIMEOUT_S = 1800
_INSTALLED = ".installed"
_RUN_STEPS = 2


@dataclass(frozen=True)
class Combination:
    """Releases that are tested together."""

    name: str
    python: str
    """Version of Python, such as 3.12."""
    requirements: tuple[str, ...] = ()
    """Requirements in addition to aligner's own; pip installs the newest releases otherwise."""
    is_pinned: bool = False
    """Whether all packages have the versions of constraints.txt."""
    has_pytriton: bool = False
    """Whether the environment contains PyTriton; otherwise, servers have another environment."""


COMBINATIONS = (
    Combination("pinned", "3.11", is_pinned=True, has_pytriton=True),
    Combination(
        "megatron-0.16-python-3.10",
        "3.10",
        ("megatron-core==0.16.*", "torch==2.13.*"),
        has_pytriton=True,
    ),
    Combination("megatron-0.17", "3.12", ("megatron-core==0.17.*", "numpy>=2", "torch==2.13.*")),
    Combination("megatron-0.18", "3.12", ("megatron-core==0.18.*", "numpy>=2", "torch==2.13.*")),
    Combination("megatron-0.19", "3.12", ("megatron-core==0.19.*", "numpy>=2", "torch==2.13.*")),
    Combination(
        "megatron-0.19-python-3.13", "3.13", ("megatron-core==0.19.*", "numpy>=2", "torch==2.13.*")
    ),
)


@dataclass(frozen=True)
class Check:
    """Tests of one part of aligner."""

    name: str
    subject: str
    """What the tests compare, for the page."""
    arguments: tuple[str, ...]
    """Arguments of pytest."""


_FAMILIES = "llama3 or mixtral or deepseek_v3 or gpt-oss or qwen3_5"
_LAYOUTS = "TP2xPP2 or TP2+SPxEP2 or CP2xEP2"
CHECKS = (
    Check(
        "data",
        "tables of tokenized examples, and tokenizers with those of transformers",
        (
            "tests/data/test_example_table.py",
            "tests/data/test_tokenizer_kinds.py",
            "-m",
            "not slow",
        ),
    ),
    Check(
        "training",
        "losses, gradients and updates of five families at layouts of four ranks with transformers",
        (
            "tests/megatron/test_families.py",
            "-m",
            "not slow",
            "-k",
            f"({_FAMILIES}) and ({_LAYOUTS})",
        ),
    ),
    Check(
        "engine",
        "log-probs of the embedded engine with the trainer's",
        ("tests/engines/test_families.py", "-m", "not slow"),
    ),
    Check(
        "export",
        "exported models with transformers",
        ("tests/megatron/test_export.py", "-m", "not slow", "-k", _FAMILIES),
    ),
)


def run_combination(combination: Combination, *, keep: bool) -> dict[str, Any]:
    """Create the environment of a combination, run all checks, and return the result.

    Args:
        combination: The combination.
        keep: Whether to keep the environment.

    Returns:
        `versions`, or `problem` if the environment could not be created; `checks`, the result of
        each check as text by its name, and `failed`, the names of failed tests.
    """
    directory = get_cache_directory() / "test_matrix" / combination.name
    try:
        # An earlier call with `keep` may have left a complete environment.
        mark = directory / _INSTALLED
        if not mark.exists() or mark.read_text() != _compute_digest(combination):
            shutil.rmtree(directory, ignore_errors=True)
            problem = _create_environment(combination, directory)
            if problem is not None:
                return {"problem": problem}
            write_file(mark, _compute_digest(combination))
        python = directory / "bin" / "python"
        result: dict[str, Any] = {"versions": _read_versions(python), "checks": {}, "failed": []}
        for check in CHECKS:
            text, failed = _run_tests(python, check)
            result["checks"][check.name] = text
            result["failed"] += failed
            print(f"{combination.name}: {check.name}: {text}", file=sys.stderr, flush=True)
        text = _run_tiny_ppo(python, has_servers=combination.has_pytriton)
        result["checks"]["run"] = text
        print(f"{combination.name}: run: {text}", file=sys.stderr, flush=True)
        return result
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _create_environment(combination: Combination, directory: Path) -> str | None:
    """Create the environment of a combination; return the reason if it could not be created."""
    interpreter = find_interpreter(combination.python)
    if interpreter is None:
        return f"no Python {combination.python} on this machine"
    subprocess.run([interpreter, "-m", "venv", directory], check=True)
    pip = [directory / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q"]
    project = f"{REPOSITORY}[server]" if combination.has_pytriton else str(REPOSITORY)
    constraints = ("--constraint", REPOSITORY / "constraints.txt") if combination.is_pinned else ()
    command = [
        *(*pip, "install", "--no-compile", *constraints, *_TEST_PACKAGES),
        *(*combination.requirements, "--editable", project),
    ]
    installed = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if installed.returncode:
        errors = [line for line in installed.stderr.splitlines() if line.startswith("ERROR:")]
        return f"pip could not install it: {errors[-1] if errors else 'no error message'}"
    return None


def _compute_digest(combination: Combination) -> str:
    """Return a digest of everything that determines the contents of an environment."""
    files = [REPOSITORY / "pyproject.toml", REPOSITORY / "constraints.txt"]
    parts = [repr(combination).encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _read_versions(python: Path) -> dict[str, str]:
    """Return the versions of Python and of `_SHOWN_PACKAGES` in an environment."""
    program = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {'Python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError:\n"
        "        pass\n"
        "print(json.dumps(found))\n"
    )
    command = [python, "-c", program, *_SHOWN_PACKAGES]
    versions: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    # Builds of torch for CPUs and for CUDA differ in the text after the plus sign.
    return {name: version.partition("+")[0] for name, version in versions.items()}


def _run_tests(python: Path, check: Check) -> tuple[str, list[str]]:
    """Run the tests of a check.

    Returns:
        Their numbers as text, such as "12 passed", and the names of the failed tests.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
        command = [python, "-m", "pytest", *options, *check.arguments]
        try:
            code = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=_build_environment(),
                stdout=sys.stderr,
                timeout=_CHECK_TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not finished within {_CHECK_TIMEOUT_S} s", []
        if not report.exists():
            return f"failed: pytest exited with code {code}", []
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    counts = {"failed": len(failed), "passed": passed, "skipped": skipped}
    # pytest exits with code 5 if it has found no test.
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "no tests", failed


def _run_tiny_ppo(python: Path, *, has_servers: bool) -> str:
    """Launch `tiny_ppo` for a few steps, and return the result as text.

    Args:
        python: Interpreter of the launcher and the trainer.
        has_servers: Whether this environment contains PyTriton; otherwise, the servers use the
            environment of this process.
    """
    overrides = [f"run.steps={_RUN_STEPS}"]
    if not has_servers:
        overrides.append(f"server.python={sys.executable}")
    with tempfile.TemporaryDirectory() as directory:
        finished = run_of_interpreter(python, Path(directory) / "run", *overrides)
        if finished.code == 0 and len(finished.metrics) == _RUN_STEPS:
            own = f"{sys.version_info.major}.{sys.version_info.minor}"
            return "passed" if has_servers else f"passed; servers with Python {own}"
        print(finished.report(), file=sys.stderr)
        return f"failed: exit code {finished.code}, {len(finished.metrics)} of {_RUN_STEPS} steps"


def _build_environment() -> dict[str, str]:
    """Return the environment variables of tests: this process's, without its packages and GPUs."""
    excluded = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS")
    inherited = {name: value for name, value in os.environ.items() if name not in excluded}
    return {**inherited, "CUDA_VISIBLE_DEVICES": ""}


def build_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return docs/compatibility.md.

    Args:
        results: Result of each combination by its name, as `run_combination` returns it.
    """
    packages = [name for name in _SHOWN_PACKAGES if name != "nvidia-pytriton"]
    checks = [*(check.name for check in CHECKS), "run"]
    titles = ["combination", "Python", *packages, *checks]
    rows = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    notes = []
    for combination in COMBINATIONS:
        result = results.get(combination.name, {"problem": "not tested"})
        versions = result.get("versions", {})
        cells = [f"`{combination.name}`", versions.get("Python", combination.python)]
        cells += [versions.get(name, "-") for name in packages]
        cells += [result.get("checks", {}).get(name, "-") for name in checks]
        rows.append(f"| {' | '.join(cells)} |")
        if problem := result.get("problem"):
            notes.append(f"- `{combination.name}`: {problem}")
        notes += [f"- `{combination.name}`: failed: `{name}`" for name in result.get("failed", ())]
    commands = [f"| {check.name} | {check.subject} | `{_quote(check)}` |" for check in CHECKS]
    run = f"aligner launch experiment=tiny_ppo run.steps={_RUN_STEPS}"
    lines = [
        "# Compatibility",
        "",
        "These combinations of Python and of aligner's main dependencies were tested on CPUs.",
        "`make test-matrix` runs the tests and writes this page; do not edit it.",
        "",
        *rows,
        "",
        *(["Failures and gaps:", "", *notes, ""] if notes else []),
        "`pinned` has the versions of `constraints.txt`, with which all tests run. The other",
        "combinations run only the tests of the next table. In a combination without PyTriton, the",
        "servers have [an environment of their own]"
        "(install.md#an-environment-of-their-own-for-the-servers).",
        "",
        "| column | comparison | command |",
        "|---|---|---|",
        *commands,
        f"| run | a PPO run with a critic server and a reward server reaches its end | `{run}` |",
        "",
    ]
    return "\n".join(lines)


def _quote(check: Check) -> str:
    """Return the command of a check."""
    words = [f'"{word}"' if " " in word else word for word in check.arguments]
    return " ".join(["python -m pytest", *words])


def read_results() -> dict[str, Any]:
    """Return the stored results of all combinations that have been tested."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main() -> None:
    """Run the combinations that the command line names, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {combination.name: combination for combination in COMBINATIONS}
    names = ", ".join(known)
    parser.add_argument("name", choices=[*known, []], nargs="*", metavar="NAME", help=names)
    parser.add_argument(
        "--keep", action="store_true", help="keep the environments for the next call"
    )
    parser.add_argument("--page", action="store_true", help="only write the page")
    parsed = parser.parse_args()
    results = {name: result for name, result in read_results().items() if name in known}
    for name in [] if parsed.page else parsed.name or known:
        results[name] = run_combination(known[name], keep=parsed.keep)
        # Results are stored after each combination, because all of them take an hour.
        write_file(RESULTS, json.dumps(results, indent=2) + "\n")
    write_file(PAGE, build_page(results))
    print(PAGE)


if __name__ == "__main__":
    main()
