"""Results of blocking calls that several tables document."""

FINISHED = "is finished, and returns"
FIRST = "is finished first"
CLOSED = "raises `ClosedError`"
ENDS = "the process ends"
GIVEN_UP = "raises `ClosedError` in its thread"
LEFT = "raises; gives up what has not begun"
HALF_WRITTEN = "the process ends; a write may be half done"
