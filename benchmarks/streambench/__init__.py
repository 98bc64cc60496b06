"""Generation with weights that stay on disk: ``deepnvme.stream`` beside what people use.

``contestants`` has who generates, ``turn`` measures one generation step by step, ``nursery`` keeps each contestant
in a process of its own, ``__main__`` alternates them, ``summary`` adds up.
"""
