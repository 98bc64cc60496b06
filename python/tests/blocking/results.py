"""The tables of blocking calls, and results that several of them document."""

# By row and column: the documented result, and programs that show it.
Cells = dict[tuple[str, str], tuple[str, ...]]

FINISHED = "finishes, then returns"
FIRST = "finishes first"
CLOSED = "raises `ClosedError`"
CLOSED_OR_FINISHED = "raises `ClosedError`, or finishes"
ENDS = "the process ends"
GIVEN_UP = "raises `ClosedError` in its thread"
LEFT = "raises; ops that have not begun are cancelled"
HALF_WRITTEN = "the process ends; a write may be half done"
