"""The limits of a local sandbox that aligner tests on each machine, and their descriptions."""

from collections.abc import Sequence
from dataclasses import dataclass

from aligner.agents.sandboxes.control_groups import find_parent_groups
from aligner.agents.sandboxes.sandbox import Isolation
from aligner.agents.sandboxes.syscall_filter import describe_unsupported_machine
from aligner.schema.environment import PythonToolConfig

_NAMESPACES = (
    "install bubblewrap 0.8 or later (pip install 'aligner[sandbox]'), and allow user namespaces"
    " (sysctl -w kernel.unprivileged_userns_clone=1, on Ubuntu also"
    " kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt"
    " seccomp=unconfined)"
)
_FILTER = "use a kernel with seccomp filters (CONFIG_SECCOMP_FILTER), on x86_64 or aarch64"
_PROCESSES = (
    "run aligner as another user than root, or give it a control group that it can write (pids)"
)
_ADDRESS_SPACE = "use a kernel that enforces RLIMIT_AS, unlike gVisor"

# By name, as in `sandbox_probe`: the description of a program that violates the limit, and the
# remedy on a machine with namespaces.
_LIMITS = {
    "network": ("the network is reachable", _NAMESPACES),
    "files": ("the machine's files are readable", _NAMESPACES),
    "read_only_files": ("files outside the working directory can be written", _NAMESPACES),
    "processes_of_others": (
        "other processes are reachable, and child processes may survive their program",
        _NAMESPACES,
    ),
    "memory_of_others": (
        "memory and files of the sandbox's own processes are accessible",
        _FILTER,
    ),
    "namespaces": ("programs can create namespaces, and mount file systems in them", _FILTER),
    "memory": ("the memory limit does not apply", _ADDRESS_SPACE),
    "processes": ("the process limit does not apply", _PROCESSES),
    "file_size": ("the limit of the size of files does not apply", _NAMESPACES),
    "memory_files": ("memfd_create provides memory outside the limit", _FILTER),
    "semaphores": ("System V semaphores provide memory outside the limit", _FILTER),
    "shared_memory": ("System V shared memory provides memory outside the limit", _FILTER),
    "message_queues": ("message queues provide memory outside the limit", _FILTER),
    "keyrings": ("keyrings provide memory outside the limit", _FILTER),
    "socket_families": ("sockets that leave the network namespace can be opened", _FILTER),
    "memory_exhaustion": (
        "if the machine's memory is exhausted, the kernel may kill other processes first",
        _NAMESPACES,
    ),
    "kernel_interfaces": ("bpf, userfaultfd or io_uring is accessible", _FILTER),
}


@dataclass(frozen=True)
class Gap:
    """A limit that this machine does not enforce."""

    name: str
    description: str
    """Clause about the violation, such as `the network is reachable`."""
    remedy: str
    """Clause in the imperative."""

    def __str__(self) -> str:
        return f"{self.name}: {self.description}"


def build_gap(name: str, isolation: Isolation) -> Gap:
    """Return the gap for a limit that `sandbox_probe` has violated."""
    description, remedy = _LIMITS[name]
    if isolation == "none":
        remedy = _NAMESPACES
    elif remedy == _FILTER and (reason := describe_unsupported_machine()):
        remedy = f"use another machine for the system call filter: {reason}"
    return Gap(name, description, remedy)


def build_failed_probe_gap(output: str) -> Gap:
    """Return the gap for a probe that did not finish, from its output."""
    reason = f"the sandbox probe failed: {output[-300:] or 'no output'}"
    return Gap("probe", reason, "repeat the command; if the error persists, report it")


def describe_gaps(gaps: Sequence[Gap]) -> str:
    """Return a text with the names and descriptions of gaps, followed by their remedies."""
    return f"{'; '.join(map(str, gaps))}. To enforce them: {list_remedies(gaps)}"


def list_remedies(gaps: Sequence[Gap]) -> str:
    """Return the remedies of gaps, each once."""
    return "; ".join(dict.fromkeys(gap.remedy for gap in gaps))


def describe_missing_groups(limits: PythonToolConfig) -> str | None:
    """Return a text about a limit for which this machine lacks control groups; None if it has them.

    The sandbox is complete without them, but its limits are larger.
    """
    if "memory" in {name for names in find_parent_groups().values() for name in names}:
        return None
    return (
        f"the limit of {limits.memory_mib} MiB applies to each of the {limits.processes} processes"
        " of a program, and not to the kernel's memory for its sockets, pipes and small files; to"
        " limit all of it together, give aligner a control group that it can write (memory)"
    )
