"""How far apart two right runs of one model may be, in logits.

Right runs differ by rounding alone: batches of another shape, and kernels of another CPU, add up
the same numbers in another order. Each bound is several times the largest difference seen with
AVX-512, AVX2 and SSE4.2 kernels, and at most half of what a fault moves where the bound is used:
one wrong token, if nothing else is said. Where two runs are compared by their tokens, a lead of
twice the bound may be overturned, for both may be off.
"""

from __future__ import annotations

F32_ROUNDING = 0.005
"""F32 weights and cells, plain attention. Seen: 0.0009; a wrong token of 600 moves 0.012."""

F16_CELLS_ROUNDING = 0.01
"""F32 weights, F16 cells, plain attention: a value may fall to either side. Seen: 0.0017."""

FLASH_ROUNDING = 0.08
"""F32 weights; flash attention adds up in F16, of 64 queries and more in F32. Seen: 0.034 at up to
170 tokens; what it is used beside moves 0.25 and more."""

SMOLLM2_F16_ROUNDING = 0.1
"""SmolLM2 with F16 weights, either attention. Seen: 0.04; a wrong token of 250 moves 0.19."""

SMOLLM2_Q4_1_ROUNDING = 1.0
"""SmolLM2 as shipped, plain attention: activations are rounded to 8 bits, by block. Seen: 0.33. One
wrong token may move as little as rounding does; of branches without their document, one at least
moves by 3."""
