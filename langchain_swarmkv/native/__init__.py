"""Floor 1: the only place that imports llama_cpp or ctypes.

`library` loads it, `model` and `context` and `sampler` own what it allocates. Everything is checked
here before it is handed over: llama.cpp ends the process on some bad input.
"""
