"""The end of the interpreter."""

from __future__ import annotations

import sys

from deepnvme.errors import ClosedError


def check_interpreter() -> None:
    """Refuse a call of an object that outlives the import system, such as a global whose ``__del__`` saves.

    Raises:
        ClosedError: nothing can be imported any more.
    """
    finders: object = sys.meta_path
    if finders is None:
        msg = "the interpreter is ending: save and load earlier, in a with block or a function of atexit.register"
        raise ClosedError(msg)
