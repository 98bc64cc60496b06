"""Training with state on disk: optimizer steps beside fio, DeepSpeed and TensorNVMe, and offloaded parameters.

``tensors`` is what is trained and how it is checked, ``steppers`` are the contestants of the rows ``step-*``,
``deepspeed_swap`` and ``tensornvme_swap`` some of them, ``offloaded`` the rows ``offload-*``. Each contestant
lives in a process of its own (``nursery``). ``rounds`` alternates them, ``summary`` adds up, ``__main__`` is the
command.
"""
