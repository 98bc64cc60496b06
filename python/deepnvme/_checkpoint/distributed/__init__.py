"""Checkpoints that several processes save and restore together.

- ``process_group`` connects the ranks, and names their groups.
- ``save`` chooses the ranks that write, checks that all ranks have the same state, and writes it.
- ``sharded`` saves and restores states of DTensors.
- ``parts`` copies files between the local disks of machines.
"""
