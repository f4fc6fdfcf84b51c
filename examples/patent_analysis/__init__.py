"""Patent analysis: six analysts read one invention disclosure that is prefilled once.

Start with `graph.py`: it is all that an application needs to write. The other modules read the
document, follow the run and draw it, for the command `swarmkv demo`.
"""
