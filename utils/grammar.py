"""A form for the answer: a grammar in Lark or GBNF, a JSON schema or a regular expression, compiled by llguidance for
one tokenizer. A state says which ids can follow a text.

Where the form allows a single text, only the tokens into which the tokenizer splits it can follow. JSON is written as
`json.dumps` does, with a space after commas and colons, unless the schema's `x-guidance` says otherwise. Knows no
sampling.
"""

import os
import re
from collections.abc import Collection, Iterator
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import is_lark_syntax as is_lark_syntax
from torch import Tensor

from utils.errors import UsageError, UserError, did_you_mean
from utils.files import object_in, read_text
from utils.objects import HfTokenizer, Json

LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # map names to schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # hold lists of schemas
_ONES = (  # hold one schema
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "contentSchema"),
    *("unevaluatedItems", "unevaluatedProperties", "additionalItems"),
)
_KEYWORDS = (  # those of JSON Schema, drafts 4 to 2020-12, OpenAPI's, and llguidance's own
    *(*_MAPS, *_LISTS, *_ONES, "x-guidance", "type", "enum", "const", "required", "format", "pattern", "default"),
    *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems"),
    *("maxItems", "uniqueItems", "minContains", "maxContains", "minProperties", "maxProperties", "title", "examples"),
    *("description", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "dependencies"),
    *("dependentRequired", "$schema", "$id", "id", "$ref", "$comment", "$anchor", "$dynamicRef", "$dynamicAnchor"),
    *("$vocabulary", "$recursiveRef", "$recursiveAnchor", "example", "nullable", "discriminator"),
)


def form_text(kind: str, value: str) -> str:
    """Return a form's text: a regex or a JSON object as given, else the content of the file `value`. UserError if it
    cannot be read."""
    given = kind == "regex" or (kind == "json_schema" and value.lstrip().startswith("{"))
    return value if given else read_text(os.path.expanduser(value))


def schema_of(text: str) -> Json:
    """Return the JSON schema in a text. UsageError, with its JSON pointer, for an unknown keyword; UserError for a text
    without a JSON object."""
    schema = object_in(text, "json_schema")
    for pointer, part in _parts(schema):
        for word in part.keys() - {*_KEYWORDS}:
            raise UsageError(f"json_schema at {pointer or '/'}: unknown keyword {word}{did_you_mean(word, _KEYWORDS)}")
    return schema


def _parts(schema: Json, pointer: str = "") -> Iterator[tuple[str, Json]]:
    """Yield a schema and those in it, each after its JSON pointer."""
    yield pointer, schema
    for word, value in schema.items():
        below: Any = value.items() if word in _MAPS and isinstance(value, dict) else ()
        below = enumerate(value) if word in _LISTS and isinstance(value, list) else below
        for name, part in [("", value)] if word in _ONES else below:
            if isinstance(part, dict):
                yield from _parts(part, f"{pointer}/{word}/{name}".rstrip("/"))


@lru_cache(maxsize=2)
def vocabulary_of(tokenizer: HfTokenizer, size: int, ends: frozenset[int]) -> LLTokenizer:
    """Return llguidance's view of a tokenizer for logits of `size` ids; `ends` are the ids that end an answer. Cached,
    as it takes a second for large vocabularies. UserError for a tokenizer without tokenizer.json."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise UserError(
            f"a form for the answer needs a tokenizer with a tokenizer.json, not {type(tokenizer).__name__}"
        )
    return LLTokenizer(backend.to_str(), max(size, backend.get_vocab_size()), eos_token=sorted(ends) or None)


@lru_cache(maxsize=8)
def compiled(kind: str, text: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Return the matcher of a form. UsageError, in one line with the position, for a broken one."""
    schema = schema_of(text) if kind == "json_schema" else {}
    try:
        other = "" if kind == "json_schema" else grammar_from("regex" if kind == "regex" else "grammar", text)
    except ValueError as error:
        raise UsageError(f"{kind}: {_line(str(error))}") from None
    grammar = other or LLMatcher.grammar_from_json_schema(schema, defaults=LAYOUT)
    if problem := LLMatcher.validate_grammar(grammar, vocabulary):
        raise UsageError(f"{kind}{_place(schema, problem)}: {_line(problem)}")
    return LLMatcher(vocabulary, grammar, log_level=0)


def _place(schema: Json, problem: str) -> str:
    """Return " at POINTER", which is the smallest part of a schema with this problem; "" if that is the whole."""
    known: Json = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    grammars = [(at, LLMatcher.grammar_from_json_schema({**known, **part})) for at, part in _parts(schema)]
    wrong = [(len(grammar), at) for at, grammar in grammars if LLMatcher.validate_grammar(grammar) == problem]
    return f" at {min(wrong)[1]}" if wrong and min(wrong)[1] else ""


def _line(problem: str) -> str:
    """Return llguidance's message in one line, with the position of the mistake."""
    if regex := re.search(r"regex parse error:\n    (.*)\n    ( *)\^+\n(?:.*\n)*?error: (.*)", problem):
        return f"{regex[3]} at character {len(regex[2]) + 1} of {regex[1]}"
    first = problem.splitlines()[0].removeprefix("Failed to convert the grammar from GBNF to Lark: ")
    return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", first)


def _check(matcher: LLMatcher) -> None:
    """Raise UserError if llguidance gave up: such a matcher would let every token follow."""
    if matcher.is_error():
        raise UserError(f"the form is too complex for this answer: {_line(matcher.get_error())}")


class GrammarState:
    """The tokens that a form allows after one text (a `FormState` of sampling/types.py). `matcher` has read the text;
    equal masks [size] are kept once, in `masks`."""

    def __init__(
        self, matcher: LLMatcher, size: int, ends: Collection[int], masks: dict[object, Tensor] | None = None
    ) -> None:
        self._matcher, self._size, self._ends, self._masks = matcher, size, ends, {} if masks is None else masks
        self._after: dict[int, GrammarState | None] = {}

    @cached_property
    def forced(self) -> int | None:
        """The only token that can follow; None if several can."""
        ended = self._ends if self._matcher.is_stopped() and len(self._ends) == 1 else ()
        return next(iter(ended or self._matcher.compute_ff_tokens()), None)

    @cached_property
    def refused(self) -> Tensor:
        """[V] bool: the ids that cannot follow. UserError where llguidance gives up."""
        key = self._matcher.compute_bitmask() if self.forced is None else self.forced
        _check(self._matcher)
        if key not in self._masks:
            self._masks[key] = (
                torch.from_numpy(np.unpackbits(np.frombuffer(key, np.uint8), bitorder="little")[: self._size]) == 0
                if isinstance(key, bytes)
                else torch.arange(self._size).ne(key)
            )
        return self._masks[key]

    def after(self, token: int) -> "GrammarState | None":
        """Return the state after one more token; None if it ends the answer or cannot follow. UserError as
        `refused`."""
        if token not in self._after:
            matcher = self._matcher.deep_copy()
            fits = token not in self._ends and matcher.try_consume_tokens([token]) == 1
            _check(matcher)
            self._after[token] = GrammarState(matcher, self._size, self._ends, self._masks) if fits else None
        return self._after[token]
