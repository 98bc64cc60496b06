"""Storage benchmarks of deepnvme and of what people use today, in alternating rounds on one folder.

The map, from the bottom up:

- ``settings``     what one run measures: sizes, counts, rounds
- ``measure``      one timed action: wall seconds, CPU seconds, bytes
- ``cache``        cold means cold: the page cache is dropped and the file is checked
- ``data``         random contents, stamps that make every write differ, verification
- ``memory``       pinned, plain and fresh tensors
- ``fio``          one fio job: its command line and its own report
- ``sweep``        the best of several settings, by trial
- ``contestants``  who is compared; one file each
- ``rows``         what is compared; one file for each kind of work
- ``rounds``       every contestant once in each round, the order turned round after round
- ``summary``      medians and ratios; ``targets`` judges them; ``table``, ``record`` and ``plot`` show them
- ``environment``  kernel, processor, disk and versions
"""
