"""Whole training runs with state and parameters on disk, compared with torch in memory.

``language_model`` is a small language model and its training, ``wide_model`` a larger model, and ``failing_calls``
makes system calls fail. ``processes`` runs programs in separate processes, which import these three by themselves.
"""
