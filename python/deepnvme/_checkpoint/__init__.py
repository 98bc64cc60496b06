"""``deepnvme.save``, ``deepnvme.load`` and ``deepnvme.Checkpointer``.

``pickler`` takes an object apart into a pickle and storages, ``safe_unpickler`` makes objects of what a pickle
describes, ``load_buffer`` is the memory that a load fills, ``tensor_names`` the way to a tensor in a nested state. The
bytes are moved by Rust.
"""
