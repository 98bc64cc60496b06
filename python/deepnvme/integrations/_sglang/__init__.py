"""SGLang's offloader: ``offloader`` has its interface, ``layer`` one module, ``weight_file`` the file."""
