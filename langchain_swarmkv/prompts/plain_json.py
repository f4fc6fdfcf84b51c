"""What users give as JSON, as JSON: strings for keys, and nothing that JSON has not."""

from __future__ import annotations

import json
from typing import Any

from langchain_swarmkv.errors import ConfigurationError

__all__ = ["plain_json"]


def plain_json(value: Any, what: str) -> Any:
    """A copy of the value, as it would come back from JSON text.

    Raises:
        ConfigurationError: it is no JSON: cyclic, too deep, or with values of other types.
    """
    try:
        return json.loads(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what} is no JSON: {error}.") from error
