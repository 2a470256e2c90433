"""A filter of system calls for the sandbox, as the kernel takes it: what has memory that no limit
of a process counts."""

import platform
import struct

_REFUSED: dict[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, (29, 68, 319, 425, 447)),
    "aarch64": (0xC00000B7, (194, 186, 279, 425, 447)),
}
"""By machine: the kernel's name of it, and the numbers of shmget, msgget, memfd_create,
io_uring_setup and memfd_secret."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT = 0, 4
_OTHER_NUMBERS = 0x40000000
"""From here on the same calls have other numbers (x32)."""
_ALLOW, _KILL, _NOT_PERMITTED = 0x7FFF0000, 0x80000000, 0x00050001


def syscall_filter() -> bytes | None:
    """The program, in classic BPF; None on a machine whose numbers are not known."""
    if platform.machine() not in _REFUSED:
        return None
    machine, numbers = _REFUSED[platform.machine()]
    program = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_IF_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    # jumps go over so many instructions
    program.append((_IF_AT_LEAST, len(numbers) + 1, 0, _OTHER_NUMBERS))
    program += [
        (_IF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)
    ]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOT_PERMITTED)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
