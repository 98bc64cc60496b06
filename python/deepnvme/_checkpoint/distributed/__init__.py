"""Checkpoints that several processes save and restore together.

- ``process_group`` connects the ranks, and ``writers`` chooses those that write.
- ``save`` writes a state that all ranks have, and ``state`` checks that it is the same.
- ``sharded`` saves and restores states of DTensors.
- ``parts`` copies files between the local disks of machines.
"""
