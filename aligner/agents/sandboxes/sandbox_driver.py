"""Driver script that runs one command inside of a local sandbox; see `local_sandbox`.

It is executed as a script and imports only the standard library. Its first argument is a JSON
object, and its other arguments are the command. It restores the sandbox's files, runs the command
with limits, kills all processes that the command has left, and saves the files. The files are saved
as an archive, so that the size of the scratch directory is limited, no program can reach them after
its command, and nothing remains on the machine when the process of the caller is killed.
"""

import contextlib
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_KILL_TIMEOUT_S = 5.0
# time in seconds between two counts of the files of a running command
_COUNT_INTERVAL_S = 0.02
_PR_SET_DUMPABLE = 4


def apply_limits(limits: Mapping[str, Any]) -> None:
    """Apply resource limits to this process and to the processes that it starts, permanently.

    Args:
        limits: `memory_bytes`, `processes`, `scratch_bytes` (maximum size of a file), and `cpu_s`,
            the processor time in seconds.
    """
    resource_limits = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["scratch_bytes"],
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
        # memory of the kernel: POSIX message queues, and signals and timers that are pending
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        # a program must not have priority over the processes of the run
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
    }
    for kind, maximum in resource_limits.items():
        resource.setrlimit(kind, (maximum, maximum))
    # the caller recognizes SIGXCPU, sent at the soft limit; SIGKILL follows at the hard limit
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def change_user(user: int) -> None:
    """Change to a user and group id, permanently; 0 for no change."""
    # set the groups first, because the process may not change them after setuid
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def start_child(user: int, function: Callable[[], None]) -> int:
    """Run a function as `user` in a child process, and return the process id.

    The exit code of the child is 1 if the function raises an exception.
    """
    child = os.fork()
    if child:
        return child
    try:
        change_user(user)
        function()
        os._exit(0)
    except BaseException as error:
        print(f"sandbox: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def wait_for(child: int, timeout_s: float) -> int | None:
    """Return the exit code of a child process; None if it still runs after the timeout."""
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        return None
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def wait_for_command(child: int, timeout_s: float, max_files: int) -> tuple[int | None, bool]:
    """Wait for a command, and count the files in the working directory meanwhile.

    The size of a tmpfs does not include the kernel's memory for each file, about 1 KiB.

    Returns:
        The exit code, or None if the command still runs, because of the timeout or of its files.
        And whether there are more than `max_files` files.
    """
    end = time.monotonic() + timeout_s
    while True:
        interval_s = min(_COUNT_INTERVAL_S, end - time.monotonic())
        exit_code = wait_for(child, max(interval_s, 0.0))
        usage = os.statvfs(".")
        has_too_many_files = usage.f_files - usage.f_ffree > max_files
        if exit_code is not None or has_too_many_files or time.monotonic() > end:
            return exit_code, has_too_many_files


def hide_from_programs() -> None:
    """Deny programs of the same user access to this process's memory and open files.

    The access is through /proc; the command itself becomes accessible again when it is executed.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def run_command(command: list[str], limits: Mapping[str, Any], files: list[int]) -> None:
    """Replace this process by the command, without the open `files` of the driver."""
    os.setsid()
    for file in files:
        os.close(file)
    apply_limits(limits)
    # Python ignores these signals, and a child process would inherit that
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def kill_all(driver: int, command: int) -> None:
    """Kill all processes of this user in the sandbox's process namespace, and wait for their end.

    Must not be called outside of a process namespace.

    Args:
        driver: Process id of this script, which is not killed.
        command: Process id of the command, for whose end the driver waits.
    """
    spared = {"1", str(driver), str(command), str(os.getpid())}
    # the kernel sends the signal to all processes at once, so that none can escape by fork
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    end = time.monotonic() + _KILL_TIMEOUT_S
    while any(name.isdigit() and name not in spared for name in _list_names("/proc")):
        if time.monotonic() > end:
            raise TimeoutError("processes of the command cannot be killed")
        time.sleep(0.002)


def restore_files(archive_file: int) -> None:
    """Extract the archive of an earlier command into the working directory."""
    if os.fstat(archive_file).st_size == 0:
        return
    import tarfile

    os.lseek(archive_file, 0, os.SEEK_SET)
    with tarfile.open(fileobj=os.fdopen(os.dup(archive_file), "rb"), mode="r:") as archive:
        # the sandbox contains the archive's files anyway, so no name or link in it can do harm
        archive.extraction_filter = staticmethod(lambda member, path: member)
        archive.extractall(".")


def save_files(archive_file: int, max_bytes: int, mount_points: list[str]) -> None:
    """Write an archive of the working directory without its entries `mount_points`.

    An empty directory leaves an empty archive.
    """
    names = sorted({*_list_names(".")} - {*mount_points})
    if not names:
        return
    import tarfile

    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    with (
        os.fdopen(os.dup(archive_file), "wb") as file,
        tarfile.open(fileobj=file, mode="w:") as archive,
    ):
        for name in names:
            _add(archive, name)


def _add(archive: Any, name: str) -> None:
    """Add a file, or a directory with its contents, to an archive."""
    entry = archive.gettarinfo(name)
    path = Path(name)
    if entry is None:  # a socket, which is useless without its process
        return
    if entry.isreg():
        # the owner may have made the file unreadable
        path.chmod(entry.mode | stat.S_IRUSR)
        with path.open("rb") as file:
            archive.addfile(entry, file)
        return
    archive.addfile(entry)
    if entry.isdir():
        path.chmod(entry.mode | stat.S_IRWXU)
        for child in sorted(_list_names(name)):
            _add(archive, f"{name}/{child}")


def _list_names(directory: str) -> list[str]:
    return [path.name for path in Path(directory).iterdir()]


def exit_if_orphaned(caller_pipe: int) -> None:
    """Exit if the caller was killed while bubblewrap started.

    Afterwards, bubblewrap has asked the kernel to kill it together with the caller.

    Args:
        caller_pipe: Pipe whose other end only the caller has open. It is closed.
    """
    is_orphan = bool(select.select([caller_pipe], [], [], 0)[0])
    os.close(caller_pipe)
    if is_orphan:
        sys.exit("the caller of the sandbox has exited")


def main() -> None:
    """Run the command, and write its result to the report file as JSON."""
    settings = json.loads(sys.argv[1])
    old_archive, new_archive, report = settings["files"]
    user = settings["user"]
    driver = os.getpid()
    os.chdir(settings["directory"])
    if settings["has_namespaces"]:
        exit_if_orphaned(settings["caller_pipe"])
        if not user:
            hide_from_programs()
    # the caller distinguishes a sandbox that has not started from a killed driver
    os.write(report, b'{"started": true}\n')

    def end_command(child: int) -> None:
        """Kill the processes that a command has started.

        Raises:
            TimeoutError: Processes of another user are still alive after the timeout.
        """
        if not settings["has_namespaces"]:
            # there may be no process of the group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        elif user:
            # the driver may not kill the processes of another user
            killing = start_child(user, lambda: kill_all(driver, child))
            if wait_for(killing, 2 * _KILL_TIMEOUT_S) != 0:
                raise TimeoutError("processes of the command cannot be killed")
        else:
            kill_all(driver, child)

    restoring = start_child(user, lambda: restore_files(old_archive))
    is_restored = wait_for(restoring, settings["state_timeout_s"]) == 0

    files = [old_archive, new_archive, report]
    child = start_child(user, lambda: run_command(sys.argv[2:], settings, files))
    if settings["has_namespaces"]:
        limits = settings["timeout_s"], settings["max_files"]
        exit_code, has_too_many_files = wait_for_command(child, *limits)
    else:
        # the scratch directory is on a disk of the machine
        exit_code = wait_for(child, settings["timeout_s"])
        has_too_many_files = False
    timed_out = exit_code is None and not has_too_many_files
    end_command(child)
    if exit_code is None:
        exit_code = wait_for(child, _KILL_TIMEOUT_S)

    is_saved = False
    if is_restored and not has_too_many_files:
        archive_options = settings["max_archive_bytes"], settings["mount_points"]
        saving = start_child(user, lambda: save_files(new_archive, *archive_options))
        is_saved = wait_for(saving, settings["state_timeout_s"]) == 0
    result = {
        "exit_code": exit_code,
        "timed_out": timed_out,
        "is_saved": is_saved,
        "has_too_many_files": has_too_many_files,
    }
    os.write(report, json.dumps(result).encode())


if __name__ == "__main__":
    main()
