"""Tensors on a GPU: deepnvme and its baselines, in alternating rounds on one folder.

The main modules, from the bottom up; ``common`` contains what all benchmarks share:

- ``gpu``         the harness's interface to a GPU, and the real one through torch
- ``fake``        the tests' fake driver behind the same interface
- ``tool``        the interface of a tool
- ``data``        the data, and its verification
- ``trial``       the best of several settings
- ``ours``        deepnvme: through bounce buffers, with cuFile, and to host memory as the reference
- ``baselines``   DeepSpeed, kvikio, a copy after the read, fio
- ``loaders``     whole files of weights
- ``rows``        a row: tools in alternating rounds
- ``transfers``   the rows `read` and `write`
- ``load``        the row `load`
- ``streaming``   the row `stream`: generation with weights on disk
- ``optimizer``   the row `optimizer`: steps with gradients on the GPU
- ``checkpoint``  the row `checkpoint`: a training run that is saved while it goes on
- ``timeline``    one recorded transfer of each kind: the cost of the copies
- ``job``         the work of one row, as it goes to its process
- ``work``        all rows by name
- ``worker``      the process of one row
- ``watchdog``    starts that process, and kills it if it hangs
- ``summary``     medians and ratios; ``targets`` judges them; ``table`` and ``record`` show them
- ``run``         runs all rows, and writes the record after each
- ``plot``        a record as a picture, if matplotlib is installed

It needs torch and deepnvme. The record names everything that is missing.
"""
