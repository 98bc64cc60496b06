"""Whole training runs with state and parameters on disk, compared with torch in memory.

``language_model`` is a small language model and its training, ``wide_model`` a larger model, and ``failing_calls``
makes system calls fail. Programs import these three by themselves, and begin with ``IMPORTS`` for that.
"""

from pathlib import Path

_FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "shared")]
IMPORTS = f"import sys\nsys.path.extend({_FOLDERS!r})\n"
