"""Checkpoints that several processes save and restore together.

- ``process_group`` connects the ranks, and ``group_names`` names their groups.
- ``save`` chooses the ranks that write, and writes a state that all ranks have. ``state`` checks that it is the same.
- ``sharded`` saves and restores states of DTensors.
- ``parts`` copies files between the local disks of machines.
"""
