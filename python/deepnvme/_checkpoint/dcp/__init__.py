"""Folders of ``torch.distributed.checkpoint``: sharded states, and ``deepnvme.integrations.dcp``.

- ``writer`` and ``reader`` are the storage writer and reader that torch calls.
- ``plans`` compares the ranks' save plans.
- ``index`` encodes ``deepnvme.json``, ``shard`` reads one file, and ``objects`` unpickles values safely.
- ``copies`` reads items through buffers, in the ranges that ``pieces`` finds.
- ``folder`` is the folder of a reader or writer, and ``keys`` finds the state's own keys.
"""
