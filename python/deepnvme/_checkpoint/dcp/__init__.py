"""Folders of ``torch.distributed.checkpoint``: sharded states, and ``deepnvme.integrations.dcp``.

- ``writer`` and ``reader`` are the storage writer and reader that torch calls, with planners of ours.
- ``index`` is the folder with its ``deepnvme.json``. ``shard`` reads from one file, in place or through buffers.
- ``values`` unpickles non-tensor values safely, and sets them under the state's own keys.
"""
