"""Tensors on a GPU: deepnvme and its baselines, in alternating rounds on one folder.

The modules, from the bottom up; the rest is in ``storagebench``:

- ``gpu``         the harness's interface to a GPU: a real one through torch, or a test's
- ``tool``        the interface of a tool, and the missing tools with the reason
- ``data``        the data, and its verification
- ``trial``       the best of several settings
- ``ours``        deepnvme: through bounce buffers, with cuFile, and to host memory as the reference
- ``baselines``   DeepSpeed, kvikio, a copy after the read, fio
- ``loaders``     whole safetensors files
- ``rows``        reads, writes and loads; each verified
- ``timeline``    one recorded transfer of each kind: the cost of the copies
- ``summary``     medians, ratios, and the targets
- ``run``         runs all rows, and writes the record after each
- ``plot``        a record as a picture, if matplotlib is installed

It needs torch and deepnvme, and nothing else: who is missing is named in the record.
"""
