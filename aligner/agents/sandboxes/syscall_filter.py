"""System call filter (seccomp) of the sandbox.

It forbids the system calls that allocate memory outside the resource limits of a process.
"""

import platform
import struct

# By machine: the kernel's identifier of the architecture (AUDIT_ARCH_*), and the numbers of shmget,
# msgget, memfd_create, io_uring_setup and memfd_secret.
_FORBIDDEN_CALLS: dict[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, (29, 68, 319, 425, 447)),
    "aarch64": (0xC00000B7, (194, 186, 279, 425, 447)),
}

# Classic BPF instructions: load a word, jump if equal, jump if greater or equal, return.
_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_GREATER_EQUAL = 0x35
_RETURN = 0x06
# offsets of the system call's number and of the architecture in struct seccomp_data
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
# first number of the x32 ABI, in which the same system calls have other numbers
_FIRST_X32_NUMBER = 0x40000000
# return values: allow, kill the process, fail with EPERM
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_NOT_PERMITTED = 0x00050001


def build_syscall_filter() -> bytes | None:
    """Return the filter as a classic BPF program; None if the machine is not supported."""
    if platform.machine() not in _FORBIDDEN_CALLS:
        return None
    architecture, numbers = _FORBIDDEN_CALLS[platform.machine()]
    # System call numbers differ between architectures, so a call of another architecture, such as
    # from 32-bit code on x86_64, kills the process.
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    # Each match jumps to the last instruction, EPERM. The second field of an instruction is the
    # number of instructions that a jump skips if its condition holds.
    program.append((_JUMP_IF_GREATER_EQUAL, len(numbers) + 1, 0, _FIRST_X32_NUMBER))
    program += [
        (_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)
    ]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOT_PERMITTED)]
    # struct sock_filter: code, jump if true, jump if false, operand
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
