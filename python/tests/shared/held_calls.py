"""Hold chosen system calls of this process until a thread of Python lets them go on, with a seccomp filter.

A thread that makes such a call while it holds the GIL, or a lock that the thread of Python needs, waits for ever.
The filter needs no root, and applies to all threads. Import what is needed first: the dynamic loader reads libraries
with the GIL held.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

# Of x86-64.
TRANSFERS = {
    "pread64": 17, "pwrite64": 18, "preadv": 295, "pwritev": 296, "preadv2": 327, "pwritev2": 328,
    "copy_file_range": 326, "fsync": 74, "fdatasync": 75, "io_uring_enter": 426, "io_submit": 209,
}  # fmt: skip
_SYS_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_SET_MODE_FILTER = 317, 38, 1
# All threads; give a descriptor that tells of calls; say if there are threads with other filters.
_FILTER_FLAGS = 1 | 8 | 16
_SECCOMP_IOCTL_NOTIF_RECV, _SECCOMP_IOCTL_NOTIF_SEND, _SECCOMP_USER_NOTIF_FLAG_CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTICE_BYTES = 80
# Filter instructions: load the number of the call, compare and jump, return.
_BPF_LD_W_ABS, _BPF_JMP_JEQ_K, _BPF_RET_K = 0x20, 0x15, 0x06
_SECCOMP_RET_ALLOW, _SECCOMP_RET_USER_NOTIF = 0x7FFF_0000, 0x7FC0_0000
# The exit status where a kernel, or a sandbox, takes no such filter.
IMPOSSIBLE = 77


class HeldCalls:
    """A thread that is asked about each of these calls, and lets it go on.

    Args:
        calls: numbers of system calls.
    """

    def __init__(self, calls: tuple[int, ...] = tuple(TRANSFERS.values())) -> None:
        self.count = 0
        self.failures: list[str] = []
        self._calls = calls
        self._probe: Callable[[], object] | None = None
        self._listener = self._filter()
        threading.Thread(target=self._answer, daemon=True).start()

    def during(self, call: Callable[[], object], probe: Callable[[], object]) -> None:
        """Make a call, and probe in another thread while the first system call of it is held."""
        self.count, self._probe = 0, probe
        call()
        assert self.count, "the call made none of these system calls"
        assert not self.failures, self.failures

    def _filter(self) -> int:
        program = [(_BPF_LD_W_ABS, 0, 0, 0)]
        program += [(_BPF_JMP_JEQ_K, len(self._calls) - place, 0, call) for place, call in enumerate(self._calls)]
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

    def _answer(self) -> None:
        while True:
            notice = bytearray(_NOTICE_BYTES)
            # The caller may have been interrupted, or be gone.
            with suppress(OSError):
                fcntl.ioctl(self._listener, _SECCOMP_IOCTL_NOTIF_RECV, notice)
                self.count += 1
                probe, self._probe = self._probe, None
                if probe is not None:
                    try:
                        probe()
                    except BaseException:
                        self.failures.append(traceback.format_exc())
                (call,) = struct.unpack_from("Q", notice)
                fcntl.ioctl(
                    self._listener,
                    _SECCOMP_IOCTL_NOTIF_SEND,
                    struct.pack("QqiI", call, 0, 0, _SECCOMP_USER_NOTIF_FLAG_CONTINUE),
                )
