"""Whole trainings with state and parameters on disk, beside torch's own in memory.

``lm`` is a small language model and how it is trained, ``wide`` a model of some size, ``trouble`` makes system calls
fail. ``children`` are processes of their own, which import these three by themselves: they import nothing from here.
"""
