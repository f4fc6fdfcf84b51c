"""Floor 2: tokens in, logits and KV out.

`contract` states what an engine is; `llama` and `fake` are the two that ship.
"""
