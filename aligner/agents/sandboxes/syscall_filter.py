"""System call filter (seccomp) of the sandbox.

The filter is an allow-list (`syscall_table`). It stops what resource limits and namespaces do not
limit: memory that no process owns, new namespaces, and sockets that are no part of the network
namespace, such as AF_VSOCK.
"""

import errno
import platform
import socket
import struct
from collections.abc import Iterable

from aligner.agents.sandboxes.syscall_table import (
    ALLOWED_CALLS,
    CHECKED_CALLS,
    UNSUPPORTED_CALLS,
)

# By machine: the kernel's identifier of the architecture (AUDIT_ARCH_*), and the position of its
# numbers in `syscall_table`.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Classic BPF instructions: load a word, jump if equal, jump if greater or equal, jump if a bit is
# set, return.
_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_GREATER_EQUAL = 0x35
_JUMP_IF_SET = 0x45
_RETURN = 0x06
# offsets in struct seccomp_data; of arguments, those of the lower 32 bits, which are all that the
# kernel reads of the arguments checked here
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_ARGUMENT_OFFSETS = tuple(range(16, 64, 8))
# return values: allow, kill the process, fail with an error number
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_FAIL = 0x00050000

# Flags of `clone` that create a namespace: mount, cgroup, UTS, IPC, user, PID and network.
_NAMESPACE_FLAGS = 0x7E020000
_SOCKET_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
# the default protocol of a family, TCP and UDP; other protocols load kernel modules
_SOCKET_PROTOCOLS = (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP)
# Linux 5.1 and later use the same numbers on all architectures, from this one on.
_FIRST_COMMON_NUMBER = 424

_Instruction = tuple[int, int, int, int]
"""Operation, number of instructions to skip if a jump's condition holds, the same if it does not
hold, and operand."""


def describe_unsupported_machine() -> str | None:
    """Return the reason why there is no filter for this machine; None if there is one."""
    machine = platform.machine()
    if machine in _ARCHITECTURES:
        return None
    return f"it supports {' and '.join(_ARCHITECTURES)}, and this machine is {machine}"


def build_syscall_filter(machine: str | None = None) -> bytes | None:
    """Return the filter as a classic BPF program; None if the machine is not supported.

    System calls that are not permitted fail with EPERM. Those newer than Linux 5.0 fail with
    ENOSYS, as on an older kernel, so that programs use their fallback: the C library creates
    threads with `clone` if `clone3` does not exist. The filter cannot read the arguments of
    `clone3`, which are in the program's memory.

    Args:
        machine: Name of the architecture; default is that of this machine.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    architecture, position = _ARCHITECTURES[machine]
    numbers = [
        number
        for name_numbers in ALLOWED_CALLS.values()
        if (number := name_numbers[position]) is not None
    ]
    # System call numbers differ between architectures, so a call of another architecture, such as
    # from 32-bit code on x86_64, kills the process.
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        _return(_KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    program += _if_number(CHECKED_CALLS["clone"][position], _check_clone())
    for name in ("socket", "socketpair"):
        program += _if_number(CHECKED_CALLS[name][position], _check_socket())
    for unsupported in UNSUPPORTED_CALLS.values():
        program += _if_number(unsupported[position], [_return(_FAIL | errno.EOPNOTSUPP)])
    for first, last in _find_ranges(numbers):
        program += [
            (_JUMP_IF_GREATER_EQUAL, 2, 0, last + 1),
            (_JUMP_IF_GREATER_EQUAL, 0, 1, first),
            _return(_ALLOW),
        ]
    # The x32 ABI of x86_64 has numbers from 0x40000000 on, for which this is the right error, too.
    program += [
        (_JUMP_IF_GREATER_EQUAL, 0, 1, _FIRST_COMMON_NUMBER),
        _return(_FAIL | errno.ENOSYS),
        _return(_FAIL | errno.EPERM),
    ]
    # struct sock_filter: code, jump if true, jump if false, operand
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)


def _if_number(number: int, block: list[_Instruction]) -> list[_Instruction]:
    """Return instructions that run a block, which ends the program, for one system call."""
    return [(_JUMP_IF_EQUAL, 0, len(block), number), *block]


def _check_clone() -> list[_Instruction]:
    """Return instructions that permit `clone` without new namespaces."""
    return [
        (_LOAD, 0, 0, _ARGUMENT_OFFSETS[0]),
        (_JUMP_IF_SET, 0, 1, _NAMESPACE_FLAGS),
        _return(_FAIL | errno.EPERM),
        _return(_ALLOW),
    ]


def _check_socket() -> list[_Instruction]:
    """Return instructions that permit sockets of some families and protocols."""
    return [
        (_LOAD, 0, 0, _ARGUMENT_OFFSETS[0]),
        *_skip_if_in(_SOCKET_FAMILIES),
        _return(_FAIL | errno.EAFNOSUPPORT),
        (_LOAD, 0, 0, _ARGUMENT_OFFSETS[2]),
        *_skip_if_in(_SOCKET_PROTOCOLS),
        _return(_FAIL | errno.EPERM),
        _return(_ALLOW),
    ]


def _skip_if_in(values: Iterable[int]) -> list[_Instruction]:
    """Return instructions that skip the next instruction if the loaded word is one of `values`."""
    words = list(values)
    return [(_JUMP_IF_EQUAL, len(words) - index, 0, word) for index, word in enumerate(words)]


def _find_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each run of consecutive numbers, in order."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
