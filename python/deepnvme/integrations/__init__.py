"""Support for checkpoints of other libraries, and for model servers. Each module imports the library that it is for."""
