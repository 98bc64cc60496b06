"""Storage benchmarks of deepnvme and its baselines, in alternating rounds on one folder.

The main modules, from the bottom up; ``common`` contains what all benchmarks share:

- ``settings``     sizes, counts and rounds of a run
- ``data``         random contents, stamps that make every write differ, verification
- ``formats``      the formats of the tools' files
- ``sweep``        the best of several settings, by trial
- ``tools``        one file for each tool
- ``rows``         one file for each kind of work
- ``rounds``       every tool once in each round, in rotating order
- ``summary``      medians and ratios; ``targets`` judges them; ``table``, ``record`` and ``plot`` show them
"""
