"""Tensors on a GPU: deepnvme beside what people use today, in alternating rounds on one folder.

The map, from the bottom up; what is not here is ``storagebench``'s:

- ``gpu``         what the harness needs of a GPU: a real one by way of torch, or whatever a test brings
- ``contestant``  what a contestant can be asked to do, and who is left out, with the reason
- ``data``        what is moved, and whether it has arrived
- ``trial``       the best of several settings
- ``ours``        deepnvme: through bounce slots, by cuFile, and to host memory, which is the mark
- ``rivals``      DeepSpeed, kvikio, a copy after the read, fio
- ``loaders``     whole safetensors files
- ``rows``        what is compared: reads, writes, loads; each verified
- ``timeline``    one transfer of each kind, recorded: what the copies cost
- ``summary``     medians, ratios, and the targets
- ``run``         all of it, with a record that is written after each row
- ``plot``        a record as a picture, where matplotlib is installed

It needs torch and deepnvme, and nothing else: who is missing is named in the record.
"""
