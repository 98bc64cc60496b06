"""Steps of a real DeepSpeed training whose state is on disk: DeepSpeed's own op beside deepnvme's.

``child`` trains, in a process for each op; ``__main__`` alternates their steps and adds up.
"""
