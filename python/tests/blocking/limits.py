"""How long a call may take after an event, and what says that it took longer."""

from __future__ import annotations

# The most seconds between an event and the end of the call, without those in which a thread waited for a CPU.
LIMIT_S = 1.0
# A busy disk may exceed the limit now and then. A call that is late has to be in time more often than not. On two CPUs
# with eight programs at work, one of 383 programs was late the first time, and in time from then on: `file.write` at
# exit. With seventeen at work it failed in three of six runs: after its exit handlers, a process cannot say how long it
# waited for a CPU.
LATE_MAX = 2
# The exit status of a program whose call exceeded the limit.
TIMED_OUT_STATUS = 75
