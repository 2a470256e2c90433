"""Sandbox in a container, which the command line of podman or docker starts."""

import asyncio
import contextlib
import secrets
import shutil
import signal
import socket

import psutil

from aligner.agents.failures import InfrastructureError
from aligner.agents.sandboxes.sandbox import (
    KILLED_EXIT_CODE,
    PROGRAM_ENVIRONMENT,
    ExecResult,
    Sandbox,
)
from aligner.schema.environment import PythonToolConfig

OWNER_LABEL = "aligner.sandbox"
"""Label of containers and images: host, id and start time of the process that has created them."""
_PROGRAMS = ("podman", "docker")
_MIB = 2**20
_START_TIMEOUT_S = 300.0  # the first start may download the image
_CALL_TIMEOUT_S = 120.0
# time in seconds after which a command that has not been killed in the container is lost
_GRACE_PERIOD_S = 10.0
# processes of a container besides those of the command: the main process and the command's parents
_OWN_PROCESSES = 8
# Main process. It ends when its standard input is closed, also because the client was killed. The
# byte-wise reading runs in a child process, so that the shell, which waits for it, also reaps the
# processes that commands have left; 137 means that the child was killed with them.
_MAIN = "while head -c 1 >/dev/null; [ $? -eq 137 ]; do :; done"
# Runs a command with CPU limit, and kills all processes of the container afterwards or after the
# timeout, except the main process, which the kernel protects, and this shell.
_RUN = (
    'timeout=$1; ulimit -t "$2"; shift 2;'
    ' (sleep "$timeout"; kill -9 -1) <&- >&- 2>&- &'
    ' "$@"; code=$?; kill -9 -1 2>/dev/null; exit $code'
)


class ContainerSandbox(Sandbox):
    """Container without network that lives as long as the sandbox.

    The client of the container's main process is a child process, and the main process ends with
    its standard input. A container therefore also ends and is removed when this process is killed.
    A snapshot is an image (`commit`). The images of killed processes are removed when the next
    sandbox on the machine starts.
    """

    def __init__(self, image: str, limits: PythonToolConfig) -> None:
        super().__init__()
        self._image = image
        self._limits = limits
        self._program = ""
        self._name = ""
        self._main: asyncio.subprocess.Process | None = None
        self._snapshots: list[str] = []

    async def close(self) -> None:
        """Remove the container and the images of its snapshots."""
        await self._remove_container()
        for image in self._snapshots:
            await self._call("rmi", "--force", image, is_checked=False)
        self._snapshots.clear()

    async def _start(self) -> None:
        self._program = _find_program()
        await _remove_leftovers(self._program)
        await self._start_container(self._image)

    async def _exec(
        self, command: list[str], stdin: bytes, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        if self._main is None or self._main.returncode is not None:
            raise InfrastructureError(f"the container {self._name} has ended")
        script = ["sh", "-c", _RUN, "sh", f"{timeout_s:g}", str(self._limits.cpu_s), *command]
        client = await _start_client(self._program, "exec", "--interactive", self._name, *script)
        assert client.stdout is not None and client.stderr is not None
        stdout = _Output(max_output_bytes // 2)
        stderr = _Output(max_output_bytes // 2)
        begin = asyncio.get_running_loop().time()
        try:
            transfers = asyncio.gather(
                _write(client, stdin),
                self._read(client.stdout, stdout),
                self._read(client.stderr, stderr),
                client.wait(),
            )
            *_, exit_code = await asyncio.wait_for(transfers, timeout_s + _GRACE_PERIOD_S)
        except asyncio.TimeoutError:
            await self._remove_container()
            raise InfrastructureError(
                f"the container {self._name} did not end a command after {timeout_s:g} s"
            ) from None
        finally:
            _kill(client)
            await client.wait()

        # podman and docker exit with 125 if they cannot run the command
        if exit_code == 125 or (exit_code != 0 and self._main.returncode is not None):
            raise InfrastructureError(f"{self._program} exec failed: {_shorten(stderr.content)}")
        is_late = asyncio.get_running_loop().time() - begin >= timeout_s
        return ExecResult(
            exit_code,
            stdout.content,
            stderr.content,
            timed_out=is_late and exit_code == KILLED_EXIT_CODE,
            is_truncated=stdout.is_truncated or stderr.is_truncated,
        )

    async def _read(self, stream: asyncio.StreamReader, output: "_Output") -> None:
        """Read an output to its end, and kill the command if the output exceeds the limit."""
        limit_bytes = self._limits.scratch_mib * _MIB
        killing: asyncio.Task[int] | None = None
        while part := await stream.read(1 << 16):
            output.add(part)
            if output.size > limit_bytes and killing is None:
                # meanwhile, the loop reads on, because the client must not block
                killing = asyncio.create_task(
                    self._try("exec", self._name, "sh", "-c", "kill -9 -1")
                )
        if killing is not None:
            await killing

    async def _snapshot(self) -> str:
        change = f"LABEL {OWNER_LABEL}={_describe_owner()}"
        image = (await self._call("commit", "--change", change, self._name)).split()[-1]
        self._snapshots.append(image)
        return image

    async def _reset(self, snapshot: str | None) -> None:
        if snapshot is not None and snapshot not in self._snapshots:
            raise KeyError(snapshot)
        await self._remove_container()
        await self._start_container(snapshot or self._image)

    async def _start_container(self, image: str) -> None:
        """Start a container, and return when it can run commands."""
        self._name = f"aligner-{secrets.token_hex(8)}"
        limits = self._limits
        options = [
            *("--name", self._name),
            *("--label", f"{OWNER_LABEL}={_describe_owner()}"),
            *("--network", "none"),
            *("--security-opt", "no-new-privileges"),
            *("--memory", f"{limits.memory_mib}m"),
            *("--pids-limit", str(limits.processes + _OWN_PROCESSES)),
            *("--entrypoint", "sh"),
        ]
        for name, value in PROGRAM_ENVIRONMENT.items():
            options += ["--env", f"{name}={value}"]
        client = await _start_client(
            self._program, "run", "--interactive", "--rm", *options, image, "-c", _MAIN
        )
        self._main = client
        end = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while await self._try("exec", self._name, "true") != 0:
            if client.returncode is not None or asyncio.get_running_loop().time() > end:
                _kill(client)
                _, message = await client.communicate()
                raise InfrastructureError(
                    f"environment.sandbox_image={image}: the container did not start:"
                    f" {_shorten(message) or 'no message'}"
                )
            await asyncio.sleep(0.1)

    async def _remove_container(self) -> None:
        """End the container and its client."""
        main = self._main
        self._main = None
        if main is None:
            return
        # `rm` alone would wait for the main process, which ignores SIGTERM
        await self._try("kill", self._name)
        await self._try("rm", "--force", self._name)
        _kill(main)
        await main.wait()

    async def _try(self, *arguments: str) -> int:
        """Run a command of podman or docker, and return its exit code."""
        client = await asyncio.create_subprocess_exec(
            self._program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await client.wait()

    async def _call(self, *arguments: str, is_checked: bool = True) -> str:
        """Run a command of podman or docker, and return its output."""
        return await _call(self._program, *arguments, is_checked=is_checked)


class _Output:
    """The beginning and the end of an output stream."""

    def __init__(self, kept_bytes: int) -> None:
        """Create an empty output, of which `kept_bytes` of the beginning and the end are kept."""
        self.size = 0
        self._kept_bytes = kept_bytes
        self._beginning = bytearray()
        self._end = bytearray()

    @property
    def is_truncated(self) -> bool:
        """Whether the middle of the output was dropped."""
        return self.size > 2 * self._kept_bytes

    @property
    def content(self) -> bytes:
        """The output, or its beginning and its end."""
        if not self.is_truncated:
            return bytes(self._beginning + self._end)
        end = self._end[len(self._end) - self._kept_bytes :]
        return bytes(self._beginning) + "\n[…]\n".encode() + bytes(end)

    def add(self, part: bytes) -> None:
        """Append a part of the stream."""
        self.size += len(part)
        missing = self._kept_bytes - len(self._beginning)
        self._beginning += part[:missing]
        self._end += part[missing:]
        # cut rarely, because each cut copies
        if len(self._end) > 2 * self._kept_bytes + (1 << 20):
            del self._end[: len(self._end) - self._kept_bytes]


def _find_program() -> str:
    """Return podman or docker. Raises InfrastructureError if neither is installed."""
    for program in _PROGRAMS:
        if shutil.which(program) is not None:
            return program
    raise InfrastructureError(
        "environment.sandbox_image: neither podman nor docker is installed on"
        f" {socket.gethostname()}; install one of them"
    )


async def _start_client(program: str, *arguments: str) -> asyncio.subprocess.Process:
    """Start a command of podman or docker with pipes."""
    return await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def _write(client: asyncio.subprocess.Process, content: bytes) -> None:
    """Write the standard input of a client, and close it."""
    assert client.stdin is not None
    # the command may end before it has read all input
    with contextlib.suppress(ConnectionError):
        client.stdin.write(content)
        await client.stdin.drain()
        client.stdin.close()


def _kill(client: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        client.send_signal(signal.SIGKILL)


async def _call(program: str, *arguments: str, is_checked: bool = True) -> str:
    """Run a command of podman or docker, and return its output.

    Raises InfrastructureError if `is_checked` and the command fails.
    """
    client = await _start_client(program, *arguments)
    try:
        output, message = await asyncio.wait_for(client.communicate(), _CALL_TIMEOUT_S)
    except asyncio.TimeoutError:
        _kill(client)
        await client.wait()
        raise InfrastructureError(f"{program} {arguments[0]} timed out") from None
    if client.returncode and is_checked:
        raise InfrastructureError(f"{program} {arguments[0]} failed: {_shorten(message)}")
    return output.decode(errors="replace")


def _shorten(message: bytes) -> str:
    """Return the end of a message as text."""
    return message.decode(errors="replace").strip()[-300:]


def _describe_owner() -> str:
    """Return the host, the id and the start time of this process, as the value of a label."""
    return _format_owner(psutil.Process())


def _format_owner(process: psutil.Process) -> str:
    return f"{socket.gethostname()}/{process.pid}/{process.create_time():.2f}"


def _has_ended(owner: str) -> bool:
    """Return whether the process that `_describe_owner` describes has ended on this machine."""
    host, process_id, _ = owner.split("/")
    if host != socket.gethostname():
        return False
    try:
        return _format_owner(psutil.Process(int(process_id))) != owner
    except psutil.NoSuchProcess:
        return True


_swept_programs = set[str]()


async def _remove_leftovers(program: str) -> None:
    """Remove the containers and images of processes that have ended; once per process."""
    if program in _swept_programs:
        return
    _swept_programs.add(program)
    kinds = (("container", ("ps", "-aq")), ("image", ("images", "-q")))
    for kind, listing in kinds:
        ids = (await _call(program, *listing, "--filter", f"label={OWNER_LABEL}")).split()
        for each in dict.fromkeys(ids):
            template = f'{{{{index .Config.Labels "{OWNER_LABEL}"}}}}'
            owner = await _call(
                program, kind, "inspect", "--format", template, each, is_checked=False
            )
            if owner.count("/") == 2 and _has_ended(owner.strip()):
                await _call(program, kind, "rm", "--force", each, is_checked=False)
