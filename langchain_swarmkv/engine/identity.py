"""Whose KV it is: everything that changes the KV of a token sequence, field by field.

Equal identities may share snapshots; where two differ, `difference` names the field, so that a
refusal can say what was changed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property

__all__ = ["IdentityDifference", "ModelIdentity"]


@dataclass(frozen=True)
class IdentityDifference:
    """The first field in which two identities differ."""

    field: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class ModelIdentity:
    """Names and digests, as text."""

    architecture: str
    tokenizer: str
    """Digest of the vocabulary."""
    weights: str
    """Digest of the whole model file; of a model in several, the digest of their digests."""
    kv_type_k: str
    kv_type_v: str
    rope: str
    """Base frequency and scale, where the model's own were replaced; and whether the context is
    long, for models whose factors are others beyond a certain size of it."""
    llama_cpp: str
    """Versions and commit of what wrote the states; others may lay them out differently."""
    adapters: str = ""
    """Digests and scales of the adapters, in order; empty without any."""
    kernel: str = ""
    """The attention kernel, where it alone can use a state; empty where V is rewritten for the
    other one, or is not there."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all fields, hexadecimal, the same in every process."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def difference(self, other: ModelIdentity) -> IdentityDifference | None:
        """How `other` differs, if it does: in the first field, for those after it follow."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return IdentityDifference(field.name, ours, theirs)
        return None
