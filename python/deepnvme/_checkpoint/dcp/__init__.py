"""Folders of ``torch.distributed.checkpoint``: sharded states, and ``deepnvme.integrations.dcp``.

- ``writer`` and ``reader`` are the storage writer and reader that torch calls.
- ``index`` encodes ``deepnvme.json``, ``shard`` reads one file, and ``objects`` unpickles values safely.
"""
