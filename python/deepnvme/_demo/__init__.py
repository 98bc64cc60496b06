"""``deepnvme demo``: save, load, generate and train on real input, compared with the tools that people use today.

- ``command``: runs the stages in order.
- ``stages``: saving and loading, generating, training. A stage alternates both tools and checks their results.
- ``weights``: the input, a real model and generated weights.
- ``comparison``: how two tools are compared, and how the result is shown.
"""
