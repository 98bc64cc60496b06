"""Make chosen system calls on chosen files fail, with a seccomp filter.

It needs no root, applies to all threads, and lasts until the process ends. Of the engine's backends it can intercept
the system calls of the threads backend.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

# prctl, and the system call numbers by CPU.
_PR_SET_NO_NEW_PRIVS, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 38, 1, 1
_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "seccomp": 317, "pread64": 17, "preadv": 295, "preadv2": 327, "pwrite64": 18, "pwritev": 296, "pwritev2": 328,
        "fallocate": 285,
    },
    "aarch64": {
        "seccomp": 277, "pread64": 67, "preadv": 69, "preadv2": 286, "pwrite64": 68, "pwritev": 70, "pwritev2": 287,
        "fallocate": 47,
    },
}  # fmt: skip
READS, WRITES, ALLOCATIONS = ("pread64", "preadv", "preadv2"), ("pwrite64", "pwritev", "pwritev2"), ("fallocate",)

# Filter instructions: load a word of the call, compare and jump, return.
_BPF_LD_W_ABS, _BPF_JMP_JEQ_K, _BPF_RET_K = 0x20, 0x15, 0x06
_SECCOMP_RET_ALLOW, _SECCOMP_RET_ERRNO = 0x7FFF_0000, 0x0005_0000
_CALL_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 16


def is_possible() -> bool:
    """Whether this CPU's system call numbers are known."""
    return platform.machine() in _NUMBERS


def swap_files(folder: str) -> list[int]:
    """Find the descriptors of unnamed files in a folder."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)  # noqa: PTH115 (it is no path)
        except OSError:
            continue
        if target.startswith(str(Path(folder).resolve()) + "/") and target.endswith(" (deleted)"):
            found.append(int(link.name))
    return found


def occupy(descriptors: list[int]) -> None:
    """Occupy descriptor numbers, so that files opened from now on get others."""
    while os.open("/dev/null", os.O_RDONLY) <= max(descriptors):
        pass


def fail(calls: tuple[str, ...], descriptors: list[int], error: int) -> None:
    """Make these calls on these descriptors fail from now on."""
    assert descriptors
    numbers = _NUMBERS[platform.machine()]
    program = [(_BPF_LD_W_ABS, 0, 0, _CALL_OFFSET)]
    program += [(_BPF_JMP_JEQ_K, len(calls) - 1 - place + 1, 0, numbers[call]) for place, call in enumerate(calls)]
    program += [(_BPF_RET_K, 0, 0, _SECCOMP_RET_ALLOW), (_BPF_LD_W_ABS, 0, 0, _FIRST_ARGUMENT_OFFSET)]
    program += [
        (_BPF_JMP_JEQ_K, len(descriptors) - 1 - place + 1, 0, number) for place, number in enumerate(descriptors)
    ]
    program += [(_BPF_RET_K, 0, 0, _SECCOMP_RET_ALLOW), (_BPF_RET_K, 0, 0, _SECCOMP_RET_ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    answers = [
        libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero),
        libc.syscall(numbers["seccomp"], _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, whole),
    ]
    if any(answers):
        raise OSError(ctypes.get_errno(), f"this kernel takes no filter of calls: {answers}")
