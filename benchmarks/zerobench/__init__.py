"""Steps of a real DeepSpeed training whose state is on disk: DeepSpeed's own op and deepnvme's.

``child`` trains, in one process for each op; ``__main__`` alternates their steps and summarises.
"""
