"""System call filter (seccomp) of the sandbox.

It forbids the system calls that allocate memory which no resource limit of a process counts.
"""

import platform
import struct

# By machine: the kernel's identifier of the architecture (AUDIT_ARCH_*), and the numbers of shmget,
# msgget, memfd_create, io_uring_setup and memfd_secret.
_REFUSED: dict[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, (29, 68, 319, 425, 447)),
    "aarch64": (0xC00000B7, (194, 186, 279, 425, 447)),
}

# Classic BPF instructions: load a word, jump if equal, jump if greater or equal, return.
_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_RETURN = 0x06
# offsets of the system call's number and of the architecture in struct seccomp_data
_NUMBER_AT = 0
_MACHINE_AT = 4
# first number of the x32 ABI, in which the same system calls have other numbers
_OTHER_NUMBERS = 0x40000000
# return values: allow, kill the process, fail with EPERM
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_NOT_PERMITTED = 0x00050001


def syscall_filter() -> bytes | None:
    """Return the filter as a classic BPF program; None on a machine with unknown numbers."""
    if platform.machine() not in _REFUSED:
        return None
    machine, numbers = _REFUSED[platform.machine()]
    program = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_IF_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    # Each match jumps to the last instruction, EPERM. The second field of an instruction is the
    # number of instructions that a jump skips if its condition holds.
    program.append((_IF_AT_LEAST, len(numbers) + 1, 0, _OTHER_NUMBERS))
    program += [
        (_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)
    ]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOT_PERMITTED)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
