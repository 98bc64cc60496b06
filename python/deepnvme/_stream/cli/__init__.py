"""The commands ``deepnvme generate`` and ``deepnvme stream-bench``.

``commands`` runs both. ``benchmark`` is the second, on a model of ``synthetic_models``.
"""
