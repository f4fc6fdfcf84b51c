"""All tests."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers run side by side, one a core: llama.cpp's threads, which wait for each other by
    # spinning, would run against each other. Before llama.cpp is loaded, or OpenMP has read it.
    os.environ.setdefault("OMP_THREAD_LIMIT", "1")
