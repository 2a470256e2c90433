"""Sandboxes of all kinds: real bubblewrap, real containers, and a real server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.failures import InfrastructureError
from aligner.agents.sandboxes import (
    Sandbox,
    SandboxFileError,
    SandboxSettings,
    create_sandbox,
    remote_sandbox,
)
from aligner.agents.sandboxes.bubblewrap import Bubblewrap
from aligner.agents.sandboxes.container_sandbox import OWNER_LABEL
from aligner.agents.sandboxes.remote_sandbox import API_KEY_VARIABLE
from aligner.agents.tool_catalogue import describe_tools
from aligner.errors import ConfigError
from aligner.schema.environment import EnvironmentConfig, PythonToolConfig
from tests.agents import container_engine
from tests.agents.test_python_sandbox import process_mark

LIMITS = PythonToolConfig(cpu_s=5, memory_mib=256, processes=8, scratch_mib=8)
GAPS = Bubblewrap.detect(LIMITS).find_gaps()
KINDS = ("local", pytest.param("container", marks=pytest.mark.slow), "remote")
_T = TypeVar("_T")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with container_engine.container_engine(tmp_path_factory.mktemp("engine")):
        yield


@contextlib.contextmanager
def serve(*options: str) -> Iterator[tuple[str, psutil.Popen]]:
    """Run `aligner serve-sandboxes`, and yield its URL and its process."""
    command = [sys.executable, "-m", "aligner", "serve-sandboxes", *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(API_KEY_VARIABLE, "the key")
        process = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield process.stdout.readline().strip(), process
        finally:
            if process.is_running():
                process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with serve() as (url, process):
        yield url
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest) -> SandboxSettings:
    """Settings of each kind of sandbox."""
    if request.param != "container" and GAPS:
        pytest.skip(f"this machine does not enforce: {GAPS}")
    if request.param == "container":
        request.getfixturevalue("engine")
        return SandboxSettings(LIMITS, image=container_engine.IMAGE)
    if request.param == "remote":
        return SandboxSettings(LIMITS, url=request.getfixturevalue("server_url"))
    return SandboxSettings(LIMITS)


def use(
    settings: SandboxSettings,
    function: Callable[[Sandbox], Awaitable[_T]],
    files: dict[str, str | bytes] | None = None,
) -> _T:
    """Call a function with a sandbox, and return its result."""

    async def run() -> _T:
        async with await create_sandbox(files, settings) as sandbox:
            return await function(sandbox)

    return asyncio.run(run())


async def shell(sandbox: Sandbox, script: str, timeout_s: float = 30.0) -> str:
    """Run a script, and return what it prints."""
    return (await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)).stdout


def test_command_returns_exit_code_and_outputs(settings):
    async def run(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "cat; echo no >&2; exit 3"], stdin="é")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "é", "no\n")
        assert not result.timed_out and not result.is_truncated
        assert (await sandbox.exec(["echo", "a b", "$HOME"])).stdout == "a b $HOME\n"
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        assert (await sandbox.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137

    use(settings, run)


def test_files_persist_between_commands_but_processes_do_not(settings):
    async def run(sandbox: Sandbox) -> None:
        with process_mark() as mark:
            await shell(
                sandbox,
                f"mkdir d; echo 1 > d/a; ln -s a d/link; chmod 700 d/a; sh -c 'sleep 100; : {mark}' &",
            )
        assert await shell(sandbox, "cat d/link; stat -c %a d/a; readlink d/link") == "1\n700\na\n"
        assert await shell(sandbox, "ps | grep -c '[s]leep 100'") in ("0\n", "")

    use(settings, run)


def test_files_are_written_and_read(settings):
    content = bytes(range(256)) * 1000

    async def run(sandbox: Sandbox) -> None:
        await sandbox.write_file("new/directory/file", content)
        assert await sandbox.read_file("new/directory/file") == content
        assert await sandbox.read_file("initial") == b"text"
        with pytest.raises(SandboxFileError, match=r"missing: .*No such file"):
            await sandbox.read_file("missing")
        with pytest.raises(SandboxFileError, match="more than 100 bytes"):
            await sandbox.read_file("new/directory/file", max_bytes=100)
        with pytest.raises(SandboxFileError, match="initial/below"):
            await sandbox.write_file("initial/below", "")

    use(settings, run, {"initial": "text"})


def test_reset_restores_snapshot_and_initial_files(settings):
    async def run(sandbox: Sandbox) -> None:
        await shell(sandbox, "echo 1 > a; echo changed > initial")
        first = await sandbox.snapshot()
        await shell(sandbox, "rm a; echo 2 > b")
        second = await sandbox.snapshot()
        await sandbox.reset(first)
        assert await shell(sandbox, "cat a b initial") == "1\nchanged\n"
        await sandbox.reset(second)
        assert await shell(sandbox, "cat a b initial") == "2\nchanged\n"
        await sandbox.reset()
        assert await shell(sandbox, "cat a b initial") == "text"
        with pytest.raises(KeyError):
            await sandbox.reset("unknown")

    use(settings, run, {"initial": "text"})


def test_late_command_is_killed_and_keeps_its_files(settings):
    async def run(sandbox: Sandbox) -> None:
        begin = time.monotonic()
        result = await sandbox.exec(["sh", "-c", "echo 1 > a; echo begun; sleep 60"], timeout_s=4)
        assert result.timed_out and result.exit_code == 137 and result.stdout == "begun\n"
        assert time.monotonic() - begin < 50
        assert await shell(sandbox, "cat a") == "1\n"

    use(settings, run)


def test_endless_output_is_truncated_in_the_middle(settings):
    async def run(sandbox: Sandbox) -> None:
        result = await sandbox.exec(
            ["sh", "-c", "echo first; yes 1234567"], timeout_s=20, max_output_bytes=1000
        )
        assert result.is_truncated and result.exit_code != 0
        assert len(result.stdout_bytes) < 1100 and result.stdout.startswith("first\n1234567\n")
        assert await shell(sandbox, "echo alive") == "alive\n"

    use(settings, run)


def test_network_and_other_files_are_unreachable(settings):
    async def run(sandbox: Sandbox) -> None:
        interfaces = await shell(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")
        assert interfaces.split() in (["lo"], [])
        with tempfile.NamedTemporaryFile(dir=Path.home()) as secret:
            result = await sandbox.exec(["cat", secret.name])
        assert result.exit_code != 0 and "No such file" in result.stderr
        assert (await sandbox.exec(["kill", "-9", str(os.getpid())])).exit_code != 0

    use(settings, run)


def test_fork_bomb_does_not_disable_the_sandbox(settings):
    async def run(sandbox: Sandbox) -> None:
        bomb = "f() { while :; do sleep 50 & done; }; f 2>/dev/null"
        result = await sandbox.exec(["sh", "-c", bomb], timeout_s=2)
        assert result.exit_code != 0
        assert await shell(sandbox, "echo alive") == "alive\n"

    use(settings, run)


def test_parallel_sandboxes_share_no_files(settings):
    async def run_one(number: int) -> str:
        async with await create_sandbox(settings=settings) as sandbox:
            await shell(sandbox, f"echo {number} > n")
            return await shell(sandbox, "cat n")

    async def run() -> list[str]:
        return await asyncio.gather(*map(run_one, range(4)))

    assert asyncio.run(run()) == [f"{number}\n" for number in range(4)]


def test_parallel_commands_run_in_order(settings):
    async def run(sandbox: Sandbox) -> None:
        await asyncio.gather(*(shell(sandbox, f"echo {number} >> n") for number in range(4)))
        assert await shell(sandbox, "cat n") == "0\n1\n2\n3\n"

    use(settings, run)


def test_sandbox_ends_when_its_process_is_killed(settings):
    program = f"""
import asyncio, sys
from aligner.agents.sandboxes import SandboxSettings, create_sandbox
async def run():
    sandbox = await create_sandbox(settings=SandboxSettings.from_json({settings.to_json()!r}))
    await sandbox.snapshot()
    print("started", flush=True)
    await sandbox.exec(["sh", "-c", "sleep 100; : " + sys.argv[1]], timeout_s=100)
asyncio.run(run())
"""
    with process_mark() as mark:
        # the mark is an argument of this process, and then of the command
        command = [sys.executable, "-c", program, mark]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "started\n"
            while not any(
                f": {mark}" in " ".join(each.info["cmdline"] or ()) and each.info["name"] == "sh"
                for each in psutil.process_iter(["cmdline", "name"])
            ):
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
    if settings.image is not None:
        label = ("--filter", f"label={OWNER_LABEL}")
        end = time.monotonic() + 60
        while container_engine.run("ps", "-aq", *label).stdout:
            assert time.monotonic() < end
            time.sleep(0.1)
        # the image of the snapshot is removed by the next process
        assert container_engine.run("images", "-q", *label).stdout
        subprocess.run(
            [sys.executable, "-c", program.replace('"sleep 100; : " + sys.argv[1]', '"true"')],
            capture_output=True,
            check=True,
        )
        assert len(container_engine.run("images", "-q", *label).stdout.split()) <= 1


@pytest.mark.skipif(bool(GAPS), reason=f"this machine does not enforce: {GAPS}")
def test_local_sandbox_ends_when_its_process_is_killed_during_the_start():
    program = f"""
import os, subprocess, sys, tempfile
from aligner.agents.sandboxes.bubblewrap import Bubblewrap
from aligner.schema.environment import PythonToolConfig
files = [tempfile.TemporaryFile() for _ in range(3)]
command = ["sh", "-c", "sleep 100; : " + sys.argv[1]]
bubblewrap = Bubblewrap.detect({LIMITS!r})
with bubblewrap.build_command(command, 100, [file.fileno() for file in files]) as (full, options):
    subprocess.Popen(full, **options)
    os._exit(0)
"""
    with process_mark() as mark:
        subprocess.run([sys.executable, "-c", program, mark], check=True)


@pytest.mark.skipif(bool(GAPS), reason=f"this machine does not enforce: {GAPS}")
def test_local_files_are_limited_and_unreadable_files_are_kept():
    async def run(sandbox: Sandbox) -> None:
        await shell(sandbox, "echo 1 > a; chmod 0 a; mkdir d; echo 2 > d/b; chmod 0 d")
        assert await shell(sandbox, "stat -c %a a d; chmod 700 d; cat d/b") == "0\n0\n2\n"
        # the files are sparse and need no space, but an archive would contain their zeros
        sparse = "for n in 1 2 3 4 5 6; do truncate -s 8M $n; done"
        result = await sandbox.exec(["sh", "-c", sparse])
        assert "the command's changes of files could not be saved" in result.stderr
        assert await shell(sandbox, "ls -d 1 a") == "a\n"

    use(SandboxSettings(LIMITS), run)


def test_remote_failures_are_infrastructure_failures():
    async def fail() -> None:
        raise AssertionError

    async def lose_server(sandbox: Sandbox) -> None:
        running = asyncio.ensure_future(sandbox.exec(["sleep", "50"]))
        await asyncio.sleep(1)
        process.kill()
        with pytest.raises(InfrastructureError, match="connection is lost"):
            await running
        # the port is open until the process has ended
        process.wait(30)
        with pytest.raises(InfrastructureError, match="cannot be reached"):
            await sandbox.exec(["true"])

    with serve("--max-sandboxes", "1") as (url, process):
        settings = SandboxSettings(LIMITS, url=url, requirement="best_effort")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(API_KEY_VARIABLE, "another key")
            with pytest.raises(InfrastructureError, match=r"key is missing or wrong.*SANDBOX_KEY"):
                use(settings, lambda sandbox: fail())
        with pytest.raises(InfrastructureError, match=r"not-installed|neither podman nor docker"):
            missing = SandboxSettings(LIMITS, image="localhost/not-installed", url=url)
            use(missing, lambda sandbox: fail())

        async def wait_for_place() -> str:
            first = await create_sandbox(settings=settings)
            second = asyncio.ensure_future(create_sandbox(settings=settings))
            await asyncio.sleep(1)
            assert not second.done(), "the server is full"
            await first.close()
            async with await second as sandbox:
                return await shell(sandbox, "echo 1")

        assert asyncio.run(wait_for_place()) == "1\n"
        use(settings, lose_server)


class LimitsPrinter:
    """Environment that creates a sandbox with the settings of the run."""

    async def reset(self, task, seed):
        async with await create_sandbox() as sandbox:
            return await shell(sandbox, "ulimit -t")

    async def step(self, action):
        return "", 0.0, True


@pytest.mark.skipif(bool(GAPS), reason=f"this machine does not enforce: {GAPS}")
def test_environment_gets_sandbox_with_settings_of_run():
    config = EnvironmentConfig(
        target=f"{__name__}:LimitsPrinter", python=PythonToolConfig(cpu_s=7), retries=0
    )
    pool = EnvironmentPool.from_config(config)
    try:
        pool.start()
        assert pool.reset("episode", {}, 0).result(60).observation == "7\n"
    finally:
        pool.close()


def test_unreachable_server_is_reported_by_validate():
    config = EnvironmentConfig(target="tools", tools=["bash"], sandbox_url="http://127.0.0.1:1")
    message = r"^environment.sandbox_url=http://127.0.0.1:1: cannot be reached"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_sandbox, "_START_ATTEMPTS", 1)
        with pytest.raises(ConfigError, match=message):
            describe_tools(config)


def test_missing_container_programs_are_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfrastructureError, match=r"sandbox_image: neither podman nor docker"):
        asyncio.run(create_sandbox(settings=SandboxSettings(LIMITS, image="image")))


def test_snapshot_archive_is_not_reachable_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def run(sandbox: Sandbox) -> list[Path]:
        await sandbox.write_file("a", "1")
        await sandbox.snapshot()
        return list(tmp_path.iterdir())

    assert use(SandboxSettings(LIMITS, requirement="best_effort"), run) == []
