"""Training with state on disk: optimizer steps of deepnvme, DeepSpeed and TensorNVMe, and offloaded parameters.

``tensors`` has the parameters and their checks, ``steppers`` the tools of the rows ``step-*`` (``deepspeed_swap``
and ``tensornvme_swap`` are two of them), ``offloaded`` the rows ``offload-*``. Each tool runs in its own process
(``workers``). ``rounds`` alternates them, ``summary`` summarises, ``__main__`` is the command.
"""
