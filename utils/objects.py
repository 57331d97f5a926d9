"""Names for values that have no type of their own: what transformers loads, whose attributes depend on the
architecture, and what a JSON file holds; and a look into such an object. Knows no library."""

from typing import Any

HfModel = Any  # a transformers model, or a module of one
HfConfig = Any  # a model's configuration, or the part of it that describes the text model
HfTokenizer = Any  # a transformers tokenizer
Json = dict[str, Any]  # a JSON object


def nested(value: object, *keys: str) -> Any:
    """Return the value under these keys of dicts in dicts; None where one is missing or is no dict."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
