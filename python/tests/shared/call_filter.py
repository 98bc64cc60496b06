"""Ask about chosen system calls of this process before the kernel makes them, with a seccomp filter. It needs no root.

The filter applies to all threads, and to the processes that they fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable, Collection
from contextlib import suppress

# The exit status where a kernel, or a sandbox, takes no such filter.
IMPOSSIBLE = 77

_SYS_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_SET_MODE_FILTER = 317, 38, 1
# All threads; give a descriptor that tells of calls; say if there are threads with other filters.
_FILTER_FLAGS = 1 | 8 | 16
_SECCOMP_IOCTL_NOTIF_RECV, _SECCOMP_IOCTL_NOTIF_SEND, _SECCOMP_USER_NOTIF_FLAG_CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTICE_BYTES, _ARGUMENTS_OFFSET = 80, 32
# Filter instructions: load the number of the call, compare and jump, return.
_BPF_LD_W_ABS, _BPF_JMP_JEQ_K, _BPF_RET_K = 0x20, 0x15, 0x06
_SECCOMP_RET_ALLOW, _SECCOMP_RET_USER_NOTIF = 0x7FFF_0000, 0x7FC0_0000


def install(calls: Collection[int]) -> int:
    """Make calls of these numbers wait for an answer. Returns the descriptor that tells of them.

    The process ends with status `IMPOSSIBLE` where that does not work.
    """
    program = [(_BPF_LD_W_ABS, 0, 0, 0)]
    program += [(_BPF_JMP_JEQ_K, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    program += [(_BPF_RET_K, 0, 0, _SECCOMP_RET_ALLOW), (_BPF_RET_K, 0, 0, _SECCOMP_RET_USER_NOTIF)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    listener: int = libc.syscall(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, _FILTER_FLAGS, whole)
    if listener < 0:
        os._exit(IMPOSSIBLE)
    return listener


def answer_one(listener: int, decide: Callable[[int], int]) -> None:
    """Wait for a call, and answer it.

    Args:
        listener: the descriptor of `install`.
        decide: returns, for the first argument of the call, the number of the error that it fails with, or 0 to let it
            go on.
    """
    notice = bytearray(_NOTICE_BYTES)
    # The caller may have been interrupted, or be gone.
    with suppress(OSError):
        fcntl.ioctl(listener, _SECCOMP_IOCTL_NOTIF_RECV, notice)
        (call,) = struct.unpack_from("Q", notice)
        error = decide(struct.unpack_from("Q", notice, _ARGUMENTS_OFFSET)[0])
        flags = 0 if error else _SECCOMP_USER_NOTIF_FLAG_CONTINUE
        fcntl.ioctl(listener, _SECCOMP_IOCTL_NOTIF_SEND, struct.pack("QqiI", call, 0, -error, flags))
