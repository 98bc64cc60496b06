"""What a file must not make its reader do: run a program or code, import a module, or touch another file."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STARTS = ("os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "subprocess.", "pty.")
_CALLS = (
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.send",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "webbrowser.",
    "urllib.",
    "shutil.",
    "code.__new__",
)
_CHANGES = ("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink")
# Libraries import modules of their own at first use.
_LIBRARIES = ("torch", "transformers", "deepnvme", "numpy")


class Watch:
    """Records forbidden events of this thread while a reader works. Audit hooks cannot be removed, so make one only."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._is_armed = False
        self._seen: list[str] = []
        # The encodings of bytes in pickles, and of names in archives, which Python imports at first use.
        for encoding in ("latin-1", "cp437"):
            codecs.lookup(encoding)
        # A module that is imported later would be written next to its source.
        sys.dont_write_bytecode = True
        sys.addaudithook(self._look)

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Fail after the block if anything forbidden was tried in it."""
        self._seen.clear()
        self._is_armed = True
        try:
            yield
        finally:
            self._is_armed = False
            assert not self._seen, f"the reader tried: {self._seen}"

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_armed:
            return
        is_import = event == "import" and not str(arguments[0]).startswith(_LIBRARIES)
        is_forbidden = event.startswith(_STARTS + _CALLS) or (is_import and arguments[0] not in sys.modules)
        if event in _CHANGES or event == "open":
            is_forbidden = not self._is_own(event, arguments)
        if is_forbidden:
            self._seen.append(f"{event} {arguments!r:.200}")

    def _is_own(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Whether a path is in the folder of this input, or is only read: a module of a library, or the kernel's."""
        path = arguments[0]
        if isinstance(path, int):
            return True
        text = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (as it is given)
        readable = ("/proc/", "/sys/", sys.prefix, sys.base_prefix, *filter(None, sys.path))
        is_read = event == "open" and arguments[1] in (None, "r", "rb") and text.startswith(readable)
        return is_read or text.startswith(self._folder)
