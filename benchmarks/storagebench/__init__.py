"""Storage benchmarks of deepnvme and its baselines, in alternating rounds on one folder.

The main modules, from the bottom up:

- ``settings``     sizes, counts and rounds of a run
- ``measure``      one timed action: wall seconds, CPU seconds, bytes
- ``cache``        drops a file from the page cache, and checks that it is gone
- ``data``         random contents, stamps that make every write differ, verification
- ``formats``      the formats of the tools' files
- ``memory``       pinned, plain and fresh tensors, and their first touch
- ``sync``         brings files and folders to the disk
- ``fio``          one fio job: its command line and its own report
- ``sweep``        the best of several settings, by trial
- ``limit``        fio at its best settings: the limit of the disk
- ``runai``        the Run:ai streamer
- ``tools``        one file for each tool
- ``rows``         one file for each kind of work
- ``rounds``       every tool once in each round, in rotating order
- ``summary``      medians and ratios; ``targets`` judges them; ``table``, ``record`` and ``plot`` show them
- ``environment``  kernel, CPU, disk and versions
"""
