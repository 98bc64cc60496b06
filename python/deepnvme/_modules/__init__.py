"""Modules whose weights come and go: shared by ``stream`` and ``offload_parameters``.

- ``partition`` groups the weights that are loaded together.
- ``forward_wrapper`` surrounds calls of modules. ``recording`` refuses calls that torch records or transforms.
- ``bound_parameter`` and ``placeholder``: the classes of a weight in memory that is reused, and of one on disk.
- ``results`` copies results that view weights.
"""
