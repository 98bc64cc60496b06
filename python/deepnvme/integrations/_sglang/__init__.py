"""SGLang's offloader.

``offloader`` has its interface, ``layer`` one module, ``layer_stream`` the reads, and ``weight_file`` the file.
"""
