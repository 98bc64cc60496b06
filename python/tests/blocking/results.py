"""Results of blocking calls that several tables document."""

FINISHED = "is finished, and returns"
FIRST = "is finished first"
CLOSED = "raises `ClosedError`"
ENDS = "the process ends"
GIVEN_UP = "raises `ClosedError` in its thread"
