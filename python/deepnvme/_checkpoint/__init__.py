"""``deepnvme.save``, ``deepnvme.load`` and ``deepnvme.Checkpointer``. Rust plans the files and transfers the bytes.

- ``save`` writes a file, or several safetensors files and their index. ``pickler`` pickles objects for torch archives.
- ``load`` checks its arguments and makes a ``load_request``, which finds and loads every kind of file, even if a save
  replaces them meanwhile. ``load_into`` fills existing tensors, and ``lazy`` reads tensors on first use, some of them
  ahead.
- ``safe_unpickler`` builds the objects of a pickle within ``size_limits``, and runs no code of the file.
- ``load_memory`` is the memory that a load fills, and the pool that reuses it.
- ``iterate`` yields the weights of a model in bounded memory.
- ``checkpointer`` saves a training run: ``save_start`` decides when a save starts, and counts its cost,
  ``background_save`` runs it, ``history`` keeps the folder, ``checkpoint`` describes a checkpoint, and ``distributed``
  coordinates processes.
- ``dcp`` writes and reads the folders of ``torch.distributed.checkpoint``.
- ``nested_states`` finds the tensors of nested states, and names them. It also finds the values that are no tensors.
"""
