"""Plans of checkpoints of public models: how evenly their bytes are distributed over the processes that save.

Nothing is written.
"""
