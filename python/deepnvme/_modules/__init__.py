"""Modules whose weights come and go: shared by ``stream`` and ``offload_parameters``.

- ``partition`` groups the weights that are loaded together.
- ``calls`` surrounds calls of modules.
- ``weight_classes``: the classes of a weight on disk, and of one in memory that is reused.
"""
