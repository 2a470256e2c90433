"""The sandbox of the tool `python` with programs that try to escape from it or to exhaust it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aligner.agents.sandboxes import SandboxSettings, bubblewrap
from aligner.agents.sandboxes.bubblewrap import Bubblewrap, find_bubblewrap
from aligner.agents.sandboxes.control_groups import find_parent_groups
from aligner.agents.sandboxes.sandbox_limits import describe_missing_groups
from aligner.agents.sandboxes.sandbox_probe import ATTEMPTS
from aligner.agents.sandboxes.sandbox_tools import PythonTool
from aligner.agents.tool_catalogue import describe_tools
from aligner.errors import ConfigError
from aligner.schema.environment import EnvironmentConfig, PythonToolConfig
from tests.other_user import UID, needs_root

LIMITS = PythonToolConfig(cpu_s=2, memory_mib=256, processes=8, scratch_mib=8)
HERE = Bubblewrap.detect(LIMITS)
REPOSITORY = Path(__file__).parents[2]
enforced = pytest.mark.skipif(
    bool(HERE.find_gaps()), reason=f"this machine does not enforce: {HERE.find_gaps()}"
)


def run(
    program: str,
    timeout_s: float = 20.0,
    sandbox: Bubblewrap = HERE,
    most_characters: int = 2000,
) -> str:
    settings = SandboxSettings(sandbox.limits, isolation=sandbox.isolation)
    tool = PythonTool(settings, most_characters)
    return asyncio.run(tool.call({"code": program}, timeout_s))


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file like those in ~/.ssh, outside of directories for temporary files."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        file = Path(directory) / "id_ed25519"
        file.write_text("the key")
        yield file


@contextlib.contextmanager
def process_mark() -> Iterator[str]:
    """Yield a text for the command lines of processes, and assert that these processes have exited."""
    mark = f"mark-{os.urandom(8).hex()}"
    yield mark
    end = time.monotonic() + 5
    while found := [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if mark in " ".join(each.info["cmdline"] or ())
    ]:
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_program_output_and_traceback_are_returned():
    assert run("print(6 * 7)") == "42" and run("x = 1") == "[nothing was printed]"
    assert run("import sys; print('a'); sys.exit(3)") == "a\n[exit code 3]"
    output = run("def f():\n    return 1 / 0\nprint('é')\nf()")
    assert (
        output.startswith("é\nTraceback")
        and 'File "program.py", line 2, in f\n    return 1 / 0' in output
    )
    assert output.endswith("ZeroDivisionError: division by zero") and "sandbox" not in output
    assert "SyntaxError" in run("x =") and run("print(input())").endswith(
        "EOFError: EOF when reading a line"
    )
    assert run("import numpy; print(numpy.arange(3).sum())") == "3"
    assert run("print(list({'a', 'b', 'c', 'd', 'e'}))") == run(
        "print(list({'a', 'b', 'c', 'd', 'e'}))"
    )


def test_programs_share_no_files():
    assert run("open('kept', 'w').write('1'); print(open('kept').read())") == "1"
    assert "FileNotFoundError" in run("open('kept')")


@pytest.mark.promise("python-tool-is-sandboxed")
@enforced
def test_sandbox_sees_only_python_and_system_files(secret):
    assert "No such file" in run(f"print(open({str(secret)!r}).read())")
    assert str(secret.parent.name) not in run(
        f"import os; print(os.listdir({str(secret.parent.parent)!r}))"
    )
    roots = set(run("import os; print(*os.listdir('/'))").split())
    assert not roots & {"home", "mnt", "var", "srv", "boot", "sys", "run"} - {
        Path(sys.prefix).parts[1]
    }
    assert (
        run("import os; print(dict(os.environ).keys() & {'USER', 'SSH_AUTH_SOCK', 'PYTHONPATH'})")
        == "set()"
    )
    assert "No such file" in run("print(open('/etc/shadow').read())")
    # Descriptor 3 is the listed directory.
    assert run("import os; print(os.listdir('/proc/self/fd'))") == "['0', '1', '2', '3']"


@enforced
@pytest.mark.parametrize(
    "place",
    ["/", "/usr", "/etc", "/dev", "/dev/shm", "/proc/sys/kernel", sys.prefix, sys.base_prefix],
)
def test_only_scratch_directory_is_writable(place):
    output = run(f"open({place + '/made'!r}, 'w'); print('written')")
    assert output.startswith("Traceback") and "written" not in output.splitlines()
    assert not Path(place, "made").exists()


@pytest.mark.promise("python-tool-is-sandboxed")
@enforced
def test_sandbox_has_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        assert "Error" in run(
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"
        )
        with pytest.raises(TimeoutError):
            server.accept()
    with (
        tempfile.TemporaryDirectory(dir=Path.home()) as directory,
        socket.socket(socket.AF_UNIX) as local,
    ):
        local.bind(f"{directory}/s")
        local.listen()
        assert "Error" in run(
            f"import socket; socket.socket(socket.AF_UNIX).connect({directory + '/s'!r})"
        )
    assert "Error" in run(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1',"
        " 53))"
    )
    assert "PermissionError" in run(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"
    )


@enforced
@pytest.mark.slow
def test_fork_bomb_is_limited_and_killed():
    bomb = """
import os, time
forked = 0
try:
    while True:
        if not os.fork():
            time.sleep(60)
        forked += 1
except OSError:
    print(forked)
"""
    before = len(psutil.pids())
    assert 1 <= int(run(bomb)) < LIMITS.processes
    every = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert run(every, 3.0).startswith("[ended after")
    end = time.monotonic() + 5
    while len(psutil.pids()) > before + LIMITS.processes // 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(psutil.pids()) <= before + LIMITS.processes // 2


def test_memory_is_bounded():
    assert run("x = bytearray(300 << 20)").endswith("MemoryError")
    assert run("x = []\nwhile True:\n    x.append(bytearray(1 << 20))").endswith("MemoryError")
    assert "Error" in run("import mmap; m = mmap.mmap(-1, 400 << 20)")


@enforced
def test_memory_without_limit_cannot_be_allocated():
    assert "PermissionError" in run("import os; os.memfd_create('x')")
    c = "import ctypes; c = ctypes.CDLL(None, use_errno=True); "
    assert run(f"{c}print(c.shmget(0, 300 << 20, 0o1600), ctypes.get_errno())") == "-1 1"
    assert run(f"{c}print(c.syscall(0x40000000 + 319, b'x', 0), ctypes.get_errno())") == "-1 38", (
        "by another number"
    )


@enforced
def test_scratch_space_is_bounded():
    fill = "for n in range(100):\n    open(str(n), 'wb').write(bytes(1 << 20))"
    assert "No space left on device" in run(fill)
    assert "File too large" in run("open('big', 'wb').truncate(9 << 20)")


@pytest.mark.slow
def test_time_is_bounded():
    begin = time.monotonic()
    assert (
        run("print('begun')\nwhile True:\n    pass") == "begun\n[ended after 2 s of processor time]"
    )
    ignores = (
        "import signal\nfor n in (1, 2, 15, 24):\n    signal.signal(n, signal.SIG_IGN)\nwhile"
        " True:\n    pass"
    )
    assert run(ignores) == "[killed by SIGKILL]"
    assert time.monotonic() - begin < 30
    begin = time.monotonic()
    assert run("import time; print('begun'); time.sleep(100)", 1.0) == "begun\n[ended after 1 s]"
    assert time.monotonic() - begin < 5


def test_endless_output_is_truncated():
    output = run("while True:\n    print('x' * 1000)", 10.0, most_characters=500)
    assert len(output) < 5000 and output.startswith("x" * 500)
    assert (
        len(
            run("import os\nwhile True:\n    os.write(2, bytes(100000))", 10.0, most_characters=500)
        )
        < 5000
    )


@enforced
def test_program_leaves_no_process_and_reaches_no_other():
    with process_mark() as mark:
        leaves = f"""
import os, subprocess, sys
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", {mark!r}], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(100)", {mark!r}])
    os._exit(0)
print("left")
"""
        begin = time.monotonic()
        assert run(leaves) == "left"
        assert time.monotonic() - begin < 10
    with process_mark() as mark:
        assert (
            run(leaves.replace('print("left")', "import time; time.sleep(100)"), 2.0)
            == "[ended after 2 s]"
        )
    assert "Error" in run(f"import os; os.kill({os.getpid()}, 9)") and "Error" in run(
        "import os; os.kill(1, 9)"
    )
    assert int(run("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))")) <= 3
    assert "Error" in run("import os; os.kill(os.getppid(), 9); open('/proc/1/mem', 'wb')")


@enforced
def test_program_dies_with_its_parent_process():
    with process_mark() as mark:
        runs = f"""
import asyncio
from aligner.agents.sandboxes import SandboxSettings, bubblewrap
from aligner.agents.sandboxes.sandbox_tools import PythonTool
program = "import sys, subprocess; print(1); subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)', {mark!r}])"
tool = PythonTool(SandboxSettings(isolation={HERE.isolation!r}), 100)
asyncio.run(tool.call({{"code": program}}, 100))
"""
        process = psutil.Popen([sys.executable, "-c", runs])
        try:
            end = time.monotonic() + 30
            while not any(mark == each.cmdline()[-1] for each in children_of(process)):
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def children_of(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [
            each
            for each in process.children(recursive=True)
            if each.is_running() and each.status() != "zombie"
        ]
    return []


@needs_root
@enforced
def test_non_root_user_gets_sandbox_in_user_namespace():
    code = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
from aligner.agents.sandboxes import SandboxSettings, bubblewrap
from aligner.agents.sandboxes.sandbox_tools import PythonTool
from aligner.schema.environment import PythonToolConfig
bubblewrap.find_bubblewrap = lambda: {find_bubblewrap()!r}
found = bubblewrap.Bubblewrap.detect(PythonToolConfig(processes=8))
namespaces = "import ctypes, os; print(os.getuid(), ctypes.CDLL(None).unshare(0x10000000))"
tool = PythonTool(SandboxSettings(found.limits, isolation=found.isolation), 100)
print(found.isolation, found.find_gaps(), asyncio.run(tool.call({{"code": namespaces}}, 20)))
"""
    user: dict[str, Any] = {"user": UID, "group": UID, "extra_groups": [], "cwd": "/", "env": {}}
    if subprocess.run(
        ["/usr/bin/python3", "-c", f"open({__file__!r}); import dataclasses"], **user, check=False
    ).returncode:
        pytest.skip("the other user has no Python, or may not read this repository")
    done = subprocess.run(
        ["/usr/bin/python3", "-B", "-c", code],
        **user,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "user_namespace [] 65534 -1", done.stderr


@enforced
def test_old_bubblewrap_is_not_used(monkeypatch, tmp_path):
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_bubblewrap() != str(old)
    old.write_text("#!/bin/sh\necho bubblewrap 0.11.0\n")
    bubblewrap._read_version.cache_clear()
    assert find_bubblewrap() == str(old)


@pytest.mark.promise("python-tool-is-sandboxed")
@needs_root
def test_unenforced_limits_are_refused_unless_accepted(monkeypatch, tmp_path):
    gaps = [gap.name for gap in Bubblewrap(LIMITS, "user_namespace").find_gaps()]
    has_group = any("pids" in names for names in find_parent_groups().values())
    assert gaps == ([] if has_group else ["processes"]), "RLIMIT_NPROC does not count root's"
    gaps = [gap.name for gap in Bubblewrap(LIMITS, "none").find_gaps()]
    assert {*gaps} == {*ATTEMPTS} - {"memory"}
    assert run("print(1)", sandbox=Bubblewrap(LIMITS, "none")) == "1"

    def settings(**given: Any) -> EnvironmentConfig:
        return EnvironmentConfig(target="tools", tools=["python"], **given)

    if not HERE.find_gaps():
        missing_group = describe_missing_groups(PythonToolConfig())
        notes = [f"note: environment.python: {missing_group}"] if missing_group else []
        assert describe_tools(settings()) == ["tool python: python", *notes]
    failing = tmp_path / "bwrap"
    failing.write_text('#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 0.8.0 && exit\nexit 1\n')
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        ConfigError,
        match=r"does not enforce these limits of the sandbox:\n  network: the network is reachable\n"
        r"  files: (.*\n)*To enforce them, install bubblewrap .*sandbox=best_effort",
    ):
        describe_tools(settings())
    lines = "\n".join(describe_tools(settings(sandbox="best_effort")))
    for gap in gaps:
        assert f"not enforced on this machine: {gap}: " in lines
    assert "note: to enforce these limits, install bubblewrap" in lines
