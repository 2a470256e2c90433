"""A child process that keeps what it makes to itself: files and shared memory have mode 0600,
whatever it does about it."""

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_FCHMOD = {"x86_64": (0xC000003E, 91), "aarch64": (0xC00000B7, 52)}
"""The system call's number, by the machine's architecture, which has one of its own in the kernel's
filters."""
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38
_LIBC = ctypes.CDLL(None, use_errno=True)
_forks_privately = False


@contextmanager
def private_children() -> Iterator[None]:
    """What this process forks inside keeps what it makes to itself, and so do its own children, for
    good."""
    global _forks_privately
    _forks_privately = True
    try:
        yield
    finally:
        _forks_privately = False


def _after_fork() -> None:
    if not _forks_privately:
        return
    os.umask(0o077)
    # Boost, of which Triton has its shared memory, opens that to everyone in spite of the mask, by
    # fchmod: here that does nothing.
    architecture, number = _FCHMOD.get(platform.machine(), (0, 0))
    instructions = [
        (0x20, 0, 0, 4),  # load the architecture
        (0x15, 0, 3, architecture),  # another one: allow
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, number),  # another one: allow
        (0x06, 0, 0, 0x00050000),  # done, with error 0
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    filters = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *one) for one in instructions)
    )
    program = ctypes.create_string_buffer(
        struct.pack("HL", len(instructions), ctypes.addressof(filters))
    )
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program)


os.register_at_fork(after_in_child=_after_fork)
