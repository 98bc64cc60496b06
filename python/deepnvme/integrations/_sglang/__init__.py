"""SGLang's offloader.

``offloader`` has its interface and the reads, ``layer`` one module and the file of its weights.
"""
