"""Make a system call on one folder fail in this process, with a seccomp filter. It needs no root.

Another process decides about each call, since only the descriptor tells which folder it is about.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path

# Of x86-64.
CALLS = {"getdents64": 217, "close": 3}
# The exit status where a kernel, or a sandbox, takes no such filter.
IMPOSSIBLE = 77

_SYS_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_SET_MODE_FILTER, _FILTER_FLAGS = 317, 38, 1, 1 | 8 | 16
_SECCOMP_IOCTL_NOTIF_RECV, _SECCOMP_IOCTL_NOTIF_SEND, _SECCOMP_USER_NOTIF_FLAG_CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTICE_BYTES, _ARGUMENTS_OFFSET = 80, 32
_BPF_LD_W_ABS, _BPF_JMP_JEQ_K, _BPF_RET_K = 0x20, 0x15, 0x06
_SECCOMP_RET_ALLOW, _SECCOMP_RET_USER_NOTIF = 0x7FFF_0000, 0x7FC0_0000


def fail(call: str, folder: Path, error: int) -> None:
    """Return in a forked child, in which this call on this folder fails. The parent ends with the child's status."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        # The parent's alarm does not count here.
        signal.alarm(60)
        listener = _filter(CALLS[call])
        socket.send_fds(theirs, [b"x"], [listener])
        # The parent has it.
        theirs.recv(1)
        return
    theirs.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if descriptors:
        ours.send(b"x")
        _decide(descriptors[0], child, folder.resolve(), error)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)


def _filter(call: int) -> int:
    program = [
        (_BPF_LD_W_ABS, 0, 0, 0),
        (_BPF_JMP_JEQ_K, 0, 1, call),
        (_BPF_RET_K, 0, 0, _SECCOMP_RET_USER_NOTIF),
        (_BPF_RET_K, 0, 0, _SECCOMP_RET_ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    listener: int = libc.syscall(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, _FILTER_FLAGS, whole)
    if listener < 0:
        os._exit(IMPOSSIBLE)
    return listener


def _decide(listener: int, child: int, folder: Path, error: int) -> None:
    """Answer each call until the child ends."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while True:
        ((_, events),) = waiting.poll()
        if not events & select.POLLIN:
            return
        notice = bytearray(_NOTICE_BYTES)
        # The caller may be gone.
        with suppress(OSError):
            fcntl.ioctl(listener, _SECCOMP_IOCTL_NOTIF_RECV, notice)
            (call,) = struct.unpack_from("Q", notice)
            (descriptor,) = struct.unpack_from("Q", notice, _ARGUMENTS_OFFSET)
            fails = _folder_of(child, descriptor) == folder
            answer = struct.pack(
                "QqiI", call, 0, -error if fails else 0, 0 if fails else _SECCOMP_USER_NOTIF_FLAG_CONTINUE
            )
            fcntl.ioctl(listener, _SECCOMP_IOCTL_NOTIF_SEND, answer)


def _folder_of(process: int, descriptor: int) -> Path | None:
    try:
        return Path(os.readlink(f"/proc/{process}/fd/{descriptor}"))  # noqa: PTH115 (it is no path)
    except OSError:
        return None
