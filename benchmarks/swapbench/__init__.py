"""State on disk that is read, changed and written back, tensor by tensor, and fio's mixed reads and writes.

``fio_mixed`` is fio, ``__main__`` alternates the two in rounds.
"""
