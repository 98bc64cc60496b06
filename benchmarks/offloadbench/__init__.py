"""Steps of a training whose weights, gradients, state and activations exceed the memory that it is given.

``child`` trains, in one process for each tool; ``__main__`` alternates their steps and summarises. The model is
that of ``zerobench``.
"""
