"""``deepnvme demo``: save, load, generate and train on real input, beside the tools that people use today.

- ``command``: runs the stages in order.
- ``checkpoints``, ``generation``, ``training``: one stage each. A stage alternates both tools and checks their results.
- ``real_model``, ``weights``: the input.
- ``cold_files``: files that are not in the page cache.
- ``comparison``, ``output``: results, and how they are shown.
"""
