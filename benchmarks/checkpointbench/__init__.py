"""Checkpoints: whole state dicts to disk and back, deepnvme beside what people use.

``models`` makes the states, ``contestants`` has who saves and loads them, ``__main__`` alternates them and sums up.
"""
