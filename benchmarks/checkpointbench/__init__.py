"""Checkpoints: whole state dicts to disk and back, with deepnvme and its baselines.

The main modules: ``states`` makes the states, ``tools`` saves and loads them, ``__main__`` alternates the tools and
summarises.
"""
