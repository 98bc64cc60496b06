"""Stand-in for SGLang's CPU kernels, which no registry offers as a wheel: it can be imported, but not called.

SGLang imports names of them on its way to a CPU engine, and computes with torch where the CPU has no AMX. A
kernel that is called after all says so.
"""

from __future__ import annotations

from typing import Any, NoReturn


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> NoReturn:
        msg = f"sgl_kernel.{name} was called, and is not here"
        raise NotImplementedError(msg)

    return kernel
