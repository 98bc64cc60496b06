"""Training with state on disk: optimizer steps of deepnvme, DeepSpeed and TensorNVMe, and offloaded parameters.

``tensors`` has the parameters and their checks. ``tools`` lists the tools of the rows ``step-*``: those in
``steppers``, ``deepspeed_swap`` and ``tensornvme_swap``. ``offloaded`` has the rows ``offload-*``. Each tool runs
in its own process (``workers``), which answers in the terms of ``protocol``. ``rounds`` alternates them,
``summary`` summarises, ``__main__`` is the command.
"""
