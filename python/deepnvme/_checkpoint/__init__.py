"""``deepnvme.save``, ``deepnvme.load`` and ``deepnvme.Checkpointer``. Rust plans the files and transfers the bytes.

- ``save`` writes a file, ``pickler`` pickles objects for torch archives, and ``shards`` splits large safetensors.
- ``load`` checks its arguments and makes a ``load_request``, which loads every kind of file. ``load_into`` fills
  existing tensors, and ``lazy`` reads tensors on first use, some of them ahead (``read_ahead``). ``plain_values`` are
  the non-tensor values of a state. ``source_files`` are the files, which a save may replace meanwhile, and what each
  contains.
- ``safe_unpickler`` builds the objects of a pickle within ``size_limits``, and runs no code of the file.
- ``load_memory`` is the memory that a load fills, and the pool that reuses it.
- ``iterate`` yields the weights of a model in bounded memory.
- ``checkpointer`` saves a training run: ``save_start`` decides when a save starts, ``background_save`` runs it,
  ``history`` keeps the folder, ``checkpoint`` describes a checkpoint, ``checkpointer_stats`` counts, and
  ``distributed`` coordinates processes.
- ``dcp`` writes and reads the folders of ``torch.distributed.checkpoint``.
- ``nested_states`` finds the tensors of nested states, and names them.
"""
