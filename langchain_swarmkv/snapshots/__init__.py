"""Floor 3: KV at rest, and the index that finds it.

`prefix_index` finds who shares a prompt's prefix, `snapshot` is the KV of one token list as bytes,
`store` states what keeps snapshots; `memory_store` and `disk_store` ship, `tiers` puts them
together. `snapshot_file` is the format on disk, `wrapping` compresses and encrypts.
"""
