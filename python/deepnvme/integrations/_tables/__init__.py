"""Embedding tables of model servers that stay in their checkpoint: independent of the server.

- ``settings``: which tables stay on disk, and their memory.
- ``mapped``: the file behind a tensor.
- ``table``: recorded rows, and their ``RowStore``.
- ``weight``: a parameter that records the rows that are copied into it, and looks them up on disk.
- ``shard``, ``scaled``: rows of one rank, and rows with scales.
- ``loading``: the tensors of a checkpoint, without reading tables.
"""
