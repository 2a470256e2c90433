"""A child process that keeps what it makes to itself: files and shared memory have mode 0600,
whatever it does about it."""

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_CALLS = {"x86_64": (0xC000003E, 91, 54), "aarch64": (0xC00000B7, 52, 208)}
"""The numbers of fchmod and setsockopt, by the machine's architecture, which has a number of its
own in the kernel's filters."""
_IPPROTO_TCP, _TCP_NODELAY = 6, 1
_ALLOW, _DO_NOTHING = 0x7FFF0000, 0x00050000
"""A filter's decisions: run the system call, or return 0 without running it."""
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
    # fchmod: here that does nothing. Triton's HTTP server sets TCP_NODELAY, also on a Unix socket,
    # which has no such option, and warns that this fails: here it does nothing.
    architecture, fchmod, setsockopt = _CALLS.get(platform.machine(), (0, 0, 0))
    load, jump_if_equal, return_value = 0x20, 0x15, 0x06
    instructions = [
        (load, 0, 0, 4),  # the architecture
        (jump_if_equal, 0, 8, architecture),  # another one: allow
        (load, 0, 0, 0),  # the call's number
        (jump_if_equal, 5, 0, fchmod),
        (jump_if_equal, 0, 5, setsockopt),  # another call: allow
        (load, 0, 0, 24),  # the call's second argument
        (jump_if_equal, 0, 3, _IPPROTO_TCP),
        (load, 0, 0, 32),  # the call's third argument
        (jump_if_equal, 0, 1, _TCP_NODELAY),
        (return_value, 0, 0, _DO_NOTHING),
        (return_value, 0, 0, _ALLOW),
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
