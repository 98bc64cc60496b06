"""Code that the benchmarks share.

From the bottom up:

- ``measure``         one timed action: wall seconds, CPU seconds, bytes
- ``not_offered``     the error of an operation that a tool does not support
- ``round_order``     the order of the tools in a round
- ``sync``            brings files and folders to the disk
- ``cache``           drops a file from the page cache, and checks that it is gone
- ``disk_idle``       waits until the disk is idle
- ``memory``          pinned, plain and fresh tensors, and their first touch
- ``fio``             one fio job: its command line and its own report
- ``hugepages``       huge pages for fio's buffers
- ``limit``           fio at its best settings: the limit of the disk
- ``handle_setting``  the settings of DeepSpeed's `aio_handle`
- ``deepspeed_op``    builds and loads DeepSpeed's async_io op
- ``runai``           the Run:ai streamer
- ``generation``      how every benchmark of models generates
- ``environment``     kernel, CPU, disk and versions
- ``command``         options, the scratch folder and the record of a command
- ``verdict``         the outcome of a target
- ``picture``         saves the chart of a record
"""
