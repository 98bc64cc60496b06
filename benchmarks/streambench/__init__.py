"""Generation with weights that stay on disk: ``deepnvme.stream`` and its baselines.

``tools`` generate, ``turn`` measures one generation step by step, ``workers`` runs each tool in its own process,
``__main__`` alternates them, ``summary`` summarises, ``build_deepspeed`` compiles DeepSpeed's ops.
"""
