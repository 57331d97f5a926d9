"""The one table of what a user can set: flags, /set, completion, help, errors and the README come from it.

A :class:`Field` names a setting, its kind, default, flag and one line of help. Knows neither how values
are layered (app/settings/layers.py) nor the command line's grammar (app/command_line/main.py). No torch.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.settings.types import (
    LANES,
    Choice,
    Drafters,
    Kind,
    KMatrix,
    Names,
    Number,
    RefusedError,
    Seed,
    Switch,
    Text,
    Whole,
    WholeOr,
    did_you_mean,
    got,
)
from utils.catalogue.specs import DRAFTER_WORDS
from utils.catalogue.templates import AUTO, NAMES
from utils.errors import COLDEST, UsageError

MODELS, DECODING, NGRAM, CASCADE, OUTPUT = "Models", "Decoding", "N-gram drafter", "Cascade", "Output"
BEAM = "Beam search"

FILES = ("prompts", "out", "report", "ids", "features", "start", "export")


@dataclass(frozen=True)
class Field:
    """One setting. `short` is the name of its own console command where that differs from `name`."""

    name: str
    kind: Kind
    default: Any
    help: str
    group: str
    short: str = ""

    @property
    def flag(self) -> str:
        """The flag that changes it: --top-p; of a switch the form that departs from the default: --no-chat."""
        words = self.name.replace("_", "-")
        return f"--no-{words}" if self.default is True else f"--{words}"

    @property
    def variable(self) -> str:
        """The environment variable: SPEC_TOP_P."""
        return f"SPEC_{self.name.upper()}"

    def read(self, value: object, label: str = "", still: Any = ...) -> Any:
        """The value this text (or plain value) means; UsageError `LABEL must be …, got … (still …)`."""
        try:
            return self.kind.read(value)
        except RefusedError as error:
            kept = "" if still is ... else f" (still {self.show(still)})"
            raise UsageError(f"{label or self.name} must be {error}, got {got(value)}{kept}") from None

    def show(self, value: Any) -> str:
        """The value as a user would type it, on one line."""
        return " ".join(self.kind.show(value).split())


_MANY = 1_000_000
_QUANTIZATION = Choice(("none", "int8", "nf4", "fp4"))
_DEVICE = r"auto|cpu|mps|cuda(:[0-9]{1,3})?"


def _name(metavar: str, allowed: str) -> Text:
    return Text(metavar=metavar, allowed=allowed, optional=True)


def _device(optional: bool) -> Text:
    choices = ("auto", "cpu", "mps", "cuda")
    return Text("D", "auto, cpu, mps, cuda or cuda:N", choices, optional=optional, pattern=_DEVICE)


_FILE = Text("FILE", "a file", pattern=r"[^\x00-\x1f\x7f]*")

_TABLE: tuple[Field, ...] = (
    Field("pair", _name("NAME", "the name of a pair"), None, "pair of the catalogue to load", MODELS),
    Field("models", _name("FILE", "a file"), None, "catalogue of pairs instead of models.yaml", MODELS),
    Field(
        "target", _name("ID|DIR|GGUF", "a hub id, folder or GGUF file"), None, "target instead of the pair's", MODELS
    ),
    Field(
        "drafter",
        Text(
            "ID|DIR|NAME",
            "a hub id, a folder, ngram, tables, tables:FILE, maxgram, plain, glide, feature, tables+feature (…), "
            "cascade, chain or none",
            DRAFTER_WORDS,
            optional=True,
        ),
        None,
        "drafter instead of the pair's: a model, or ngram, tables, maxgram, plain, glide, feature, tables+feature, "
        "cascade, chain, none",
        MODELS,
    ),
    Field("device", _device(False), "auto", "where the target runs: auto, cpu, mps, cuda[:N]", MODELS),
    Field("drafter_device", _device(True), None, "where the drafter runs (default: with the target)", MODELS),
    Field("tp_size", WholeOr(2, 1024, "auto"), "auto", "processes that share the target (torchrun)", MODELS),
    Field("dtype", Choice(("auto", "float32", "float16", "bfloat16")), "auto", "number format of the weights", MODELS),
    Field("quantization", _QUANTIZATION, "none", "fewer bits for the target's weights", MODELS),
    Field("drafter_quantization", _QUANTIZATION, "none", "fewer bits for the drafter's weights", MODELS),
    Field("attn_implementation", _name("X", "a name"), None, "attention code of transformers (sdpa, eager …)", MODELS),
    Field("revision", _name("R", "a branch, tag or commit"), None, "revision of the target on the hub", MODELS),
    Field("trust_remote_code", Switch(), False, "run code that comes with a model", MODELS),
    Field("offline", Switch(), False, "never use the network", MODELS),
    Field("gamma", WholeOr(1, 64, "auto"), 4, "tokens to draft a round; auto: what is fastest", DECODING),
    Field("temperature", Number(0, 5, least=COLDEST), 0.0, "randomness; 0: the likeliest token", DECODING),
    Field("top_p", Number(0, 1, without_low=True), 1.0, "sample from this share; 1: all", DECODING),
    Field("top_k", Whole(0, _MANY), 0, "sample from the k best; 0: all", DECODING),
    Field("min_p", Number(0, 1, without_high=True), 0.0, "least share of the best token's", DECODING),
    Field(
        "repetition_penalty", Number(0, 10, without_low=True), 1.0, "makes what was said less likely; 1: off", DECODING
    ),
    Field("no_repeat_ngram", Whole(0, _MANY), 0, "say no n-gram of this length twice; 0: off", DECODING),
    Field("max_new_tokens", Whole(1, _MANY), 128, "longest answer, in tokens", DECODING, short="length"),
    Field("seed", Seed(), 42, "seed; random draws one", DECODING),
    Field(
        "coupling",
        Choice(("rejection", "gumbel")),
        "rejection",
        "how sampled drafts are judged; gumbel keeps plain decoding's text",
        DECODING,
    ),
    Field("draft_sampling", Choice(("law", "greedy")), "law", "draw drafts, or take the drafter's likeliest", DECODING),
    Field("verify", Choice(("token", "block")), "token", "judge drawn drafts token by token, or as blocks", DECODING),
    Field(
        "expand",
        Choice(("auto", "none", "cape", "dynamic")),
        "auto",
        "grow drafts into trees: siblings where a model is unsure, the likeliest nodes of all, or what is fastest",
        DECODING,
    ),
    Field("nodes", Whole(1, 64), 24, "most draft nodes of a round, where drafts are trees", DECODING),
    Field("system", Text(), "", "system prompt", DECODING),
    Field("chat", Switch(), True, "use the model's chat template", DECODING),
    Field("template", Choice(NAMES, suggests=True), AUTO, "chat template; auto: the model's own", DECODING),
    Field("ngram_n", Whole(2, 16), 3, "longest n-gram looked up", NGRAM),
    Field("ngram_multi_level", Switch(), True, "fall back to shorter n-grams", NGRAM),
    Field("ngram_filler", Whole(1, 64), 3, "also count the target's k likeliest tokens; 1: only what it wrote", NGRAM),
    Field("ngram_stop_if_unknown", Switch(), True, "stop drafting at an unknown n-gram", NGRAM),
    Field("ngram_reset", Switch(), True, "forget the n-grams between answers", NGRAM),
    Field("cascade", Drafters(), (), "drafters of the lanes cascade and chain, large to small", CASCADE),
    Field("k_matrix", KMatrix(), (), "tokens each drafter adds; first row: for the target", CASCADE),
    Field("lenience", Number(1, _MANY), 1.0, "how much drafters let pass; 1: nothing", CASCADE),
    Field("num_beams", Whole(1, 64), 4, "texts that the lane beam grows at a time", BEAM),
    Field("beam_top_k", Whole(0, _MANY), 0, "tokens each may go on with; 0: all that can count", BEAM),
    Field("min_length", Whole(0, _MANY), 0, "least tokens of a beam's answer", BEAM),
    Field("length_penalty", Number(0, 10), 1.2, "0: none; more: longer answers win", BEAM),
    Field("compare", Names(LANES), ("ar", "spec"), "lanes; the last carries the chat", OUTPUT),
    Field("view", Choice(("auto", "side", "stack", "trace")), "auto", "how the lanes are laid out", OUTPUT),
    Field("color", Choice(("auto", "always", "never")), "auto", "when to use colour", OUTPUT),
    Field("palette", Choice(("default", "cb")), "default", "colours; cb: for colour-blind eyes", OUTPUT),
    Field("ascii", Switch(), False, "draw with plain ASCII", OUTPUT),
    Field("quiet", Switch(), False, "answers only", OUTPUT),
    Field("data_dir", Text("DIR", "a folder"), "", "folder of the data sets that have a name", OUTPUT),
    Field("verbose", Switch(), False, "more detail, tracebacks of errors", OUTPUT),
    Field("debug", Switch(), False, "show details of every round", OUTPUT),
    Field("record", _FILE, "", "write all that is decoded to this file, for replay", OUTPUT),
)

FIELDS: Mapping[str, Field] = {field.name: field for field in _TABLE}
MODEL_FIELDS: Mapping[str, Field] = {field.name: field for field in _TABLE if field.group == MODELS}
SETTING_FIELDS: Mapping[str, Field] = {field.name: field for field in _TABLE if field.group != MODELS}
_SHORT = {field.short: field for field in _TABLE if field.short}


def default(name: str) -> Any:
    """The built-in value."""
    return FIELDS[name].default


def setting(name: str) -> Field:
    """The field of a decoding or output setting, by name or short name; UsageError with the nearest name."""
    found = SETTING_FIELDS.get(name) or _SHORT.get(name)
    if found is None:
        raise UsageError(f"unknown setting {got(name)}{did_you_mean(name, SETTING_FIELDS)}")
    return found


def arguments(fields: Mapping[str, Field], given: Mapping[str, Any], **more: Any) -> Namespace:
    """What a command takes beside the settings: of each flag what was given, else its default; files as paths.

    UsageError names the flag.
    """
    read = {name: field.read(given[name], label=field.flag) for name, field in fields.items() if name in given}
    values = {name: field.default for name, field in fields.items()} | read
    texts = {name: value for name, value in values.items() if name in FILES and value}
    paths = {
        name: Path(os.path.expanduser(text)) for name, text in texts.items() if text not in fields[name].kind.choices
    }
    return Namespace(**(values | paths | more))
