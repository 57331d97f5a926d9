"""The one table of settings, from which flags, variables, /set, completion, help, errors and the tables of
docs/reference.md are made; and the layers of their values, lowest first: built in < models.yaml < pair < environment <
flags < changes in the console.

A setting is one call of :func:`setting`: its type, default, range, one line of help and group. The rows of
:class:`Settings` can stand in models.yaml and change while the console runs; those of :class:`ModelOptions` choose the
models, their devices and number formats. Does not know the command line's grammar (app/command_line/arguments.py). No
torch.
"""

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import pydantic

from app.settings.types import (
    BIAS,
    DRAFTER_NAMES,
    K_MATRIX,
    LANE_NAMES,
    SEED,
    SWITCH,
    TEXTS,
    Choice,
    Number,
    RefusedError,
    SettingKind,
    Text,
    Whole,
    enumerated,
    got,
)
from sampling.drafters.registry import DRAFTERS, examples
from utils.catalogue.templates import AUTO, NAMES
from utils.errors import COLDEST, UsageError, did_you_mean, nearest, raise_first

SettingValues = Mapping[str, Any]  # by name, as they were given or as they were read

MODELS, DECODING, NGRAM, CASCADE, OUTPUT = "Models", "Decoding", "N-gram drafter", "Cascade", "Output"
BEAM = "Beam search"

FORMS = "grammar", "json_schema", "regex"  # settings that give the answer a form

# Flags whose values become paths.
FILES = ("prompts", "out", "report", "from", "ids", "features", "start", "page")


@dataclass(frozen=True)
class Field:
    """One setting, or a flag of a sub-command, which needs no `group`. `short`: the name of its console command if that
    differs from `name`. `also`: a second name for the flag, which is the one shown. `off`: the value for which the word
    "off" stands, where the kind does not read that word. A `rare` flag is shown only by `--help all`.
    """

    name: str
    kind: SettingKind | Any  # or another object with the methods of SettingKind
    default: Any = None
    help: str = ""
    group: str = ""
    short: str = ""
    also: str = ""
    off: Any = None
    rare: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that set it, the one to show first: --top-p."""
        return tuple(f"--{name.replace('_', '-')}" for name in (self.also, self.name) if name)

    @property
    def flag(self) -> str:
        """The flag that help shows; of a switch the form that departs from the default: --no-chat."""
        return f"--no-{self.flags[0][2:]}" if self.default is True else self.flags[0]

    @property
    def variable(self) -> str:
        """The environment variable: SPEC_TOP_P."""
        return f"SPEC_{self.name.upper()}"

    def read(self, value: object, label: str = "", current: Any = ...) -> Any:
        """Return the checked value of a text or a Python value; UsageError `LABEL must be …, got … (still …)`."""
        named_off = self.off is not None and str(value).lower() == "off"
        try:
            return self.kind.read(self.off if named_off else value)
        except RefusedError as error:
            holds = "" if current is ... else f" (still {self.show(current)})"
            raise UsageError(f"{label or self.name} must be {error}, got {got(value)}{holds}") from None

    def show(self, value: Any) -> str:
        """Return the value as a user would type it, on one line."""
        return " ".join(self.kind.show(value).split())


def by_name(*fields: Field) -> Mapping[str, Field]:
    """Return the flags of a sub-command, by name."""
    return {field.name: field for field in fields}


def setting(default: Any, kind: Any, help: str, group: str, **more: Any) -> Any:
    """Declare a setting of a record; `more` may give `short`, `also`, `off` and `rare`, see :class:`Field`."""
    return pydantic.Field(default, description=help, json_schema_extra={"kind": kind, "group": group, **more})


class _Record(pydantic.BaseModel):
    """A frozen record whose values are read by the rows of its fields, so that every way to set one gives the same
    error."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    noun: ClassVar[str]  # what an error calls one of its rows

    @classmethod
    @cache
    def fields(cls) -> dict[str, Field]:
        """Return the rows by name, in the order of the table."""
        rows: dict[str, Any] = dict(cls.model_fields)
        return {
            name: Field(name=name, default=info.default, help=info.description, **info.json_schema_extra)
            for name, info in rows.items()
        }

    @classmethod
    def field(cls, name: str) -> Field:
        """Return the row of this name, short name or flag's name; UsageError with the nearest one."""
        rows = cls.fields()
        named = {name: field for field in rows.values() for name in (field.short, field.also) if name} | rows
        if name not in named:
            raise UsageError(f"unknown {cls.noun} {got(name)}{did_you_mean(name, cls.fields())}")
        return named[name]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read(cls, data: SettingValues) -> SettingValues:
        """Read every value by its row; the constructor, too, raises UsageError for a wrong one."""
        return {name: cls.field(name).read(value) for name, value in dict(data).items()}

    def changed(self, **changes: object) -> Self:
        """Return a copy with these values (text or plain); UsageError, with the present value, when one is refused."""
        fields = {name: self.field(name) for name in changes}
        read = {each.name: each.read(changes[name], current=getattr(self, each.name)) for name, each in fields.items()}
        return self.model_copy(update=read)

    def show(self, name: str) -> str:
        """Return the value of one setting as a user would type it."""
        field = self.field(name)
        return field.show(getattr(self, field.name))


_MANY = 1_000_000
_QUANTIZATION = Choice(("auto", "none", "q4", "q8", "int8", "nf4", "fp4"))


def _name(metavar: str, allowed: str) -> Text:
    return Text(metavar=metavar, allowed=allowed, optional=True)


def _device(optional: bool) -> Text:
    return Text(
        "D",
        "auto, cpu, mps, cuda or cuda:N",
        ("auto", "cpu", "mps", "cuda"),
        optional=optional,
        pattern=r"auto|cpu|mps|cuda(:(0|[1-9][0-9]{0,2}))?",
    )


_DRAFTERS = enumerated(
    f"{word} (…)" if "+" in word else {"tables": "tables, tables:FILE"}.get(word, word) for word in examples()
)
_FILE = Text("FILE", "a file", pattern=r"[^\x00-\x1f\x7f]*")


class ModelOptions(_Record):
    """The models to load, their devices and number formats; None leaves the choice to the pair or to the loader."""

    noun = "model option"

    pair: str | None = setting(None, _name("NAME", "the name of a pair"), "pair of the catalogue to load", MODELS)
    models: str | None = setting(
        None, _name("FILE", "a file"), "catalogue of pairs instead of models.yaml", MODELS, rare=True
    )
    target: str | None = setting(
        None,
        _name("ID|DIR|GGUF|URL", "a hub id, folder, GGUF file or a server's URL"),
        "target instead of the pair's; http://HOST:PORT/v1 is a server with OpenAI's protocol, …/api one with Ollama's",
        MODELS,
    )
    tokenizer: str | None = setting(
        None,
        _name("ID|DIR|GGUF", "a hub id, folder or GGUF file"),
        "a server's tokenizer, for drafts made here; with --pair that pair's is taken",
        MODELS,
        rare=True,
    )
    model: str | None = setting(
        None, _name("NAME", "a name"), "the server's name for the model, if it has several", MODELS, rare=True
    )
    drafter: str | None = setting(
        None,
        Text(
            "ID|DIR|NAME",
            f"a hub id, a folder, {_DRAFTERS}",
            DRAFTERS,
            optional=True,
        ),
        f"drafter instead of the pair's: a model, or {', '.join(examples())}",
        MODELS,
    )
    tables: str | None = setting(
        None, _name("FILE", "a file"), "n-gram tables or a bigram list instead of the pair's tables", MODELS, rare=True
    )
    device: str = setting("auto", _device(False), "where the target runs: auto, cpu, mps, cuda[:N]", MODELS)
    drafter_device: str | None = setting(
        None, _device(True), "where the drafter runs (default: with the target)", MODELS, rare=True
    )
    dtype: str = setting(
        "auto", Choice(("auto", "float32", "float16", "bfloat16")), "number format of the weights", MODELS, rare=True
    )
    quantization: str = setting("auto", _QUANTIZATION, "bits of the target's weights; auto: what its file has", MODELS)
    drafter_quantization: str = setting("auto", _QUANTIZATION, "bits of the drafter's weights", MODELS, rare=True)
    kv_dtype: str = setting(
        "auto",
        Choice(("auto", "float32", "float16")),
        "number format of cached keys and values in the compiled pass; auto: float16, over a folder's floats float32",
        MODELS,
        rare=True,
    )
    activations: str = setting(
        "q8",
        Choice(("q8", "q16")),
        "bits of the compiled pass's activations; q16: nearly exact, passes over several tokens take longer",
        MODELS,
        rare=True,
    )
    attn_implementation: str | None = setting(
        None, _name("X", "a name"), "attention code of transformers (sdpa, eager …)", MODELS, rare=True
    )
    graphs: bool = setting(
        False, SWITCH, "replay short passes as CUDA graphs (Llama, Mistral, Qwen2 on an NVIDIA GPU)", MODELS, rare=True
    )
    revision: str | None = setting(
        None, _name("R", "a branch, tag or commit"), "revision of the target on the hub", MODELS, rare=True
    )
    trust_remote_code: bool = setting(False, SWITCH, "run code that comes with a model", MODELS, rare=True)
    offline: bool = setting(False, SWITCH, "never use the network", MODELS)


class Settings(_Record):
    """The settings of decoding and of the display."""

    noun = "setting"

    gamma: int | str = setting(4, Whole(1, 64, "auto"), "tokens to draft a round; auto: the fastest number", DECODING)
    temperature: float = setting(
        0.0, Number(0, 5, least=COLDEST), "randomness; 0: the likeliest token", DECODING, off=0
    )
    top_p: float = setting(1.0, Number(0, 1, without_low=True), "sample from this share; 1: all", DECODING, off=1)
    top_k: int = setting(0, Whole(0, _MANY), "sample from the k best; 0: all", DECODING, off=0)
    min_p: float = setting(
        0.0, Number(0, 1, without_high=True), "least share of the best token's; 0: all", DECODING, off=0
    )
    repetition_penalty: float = setting(
        1.0, Number(0, 10, without_low=True), "makes what was said less likely; 1: off", DECODING, off=1, rare=True
    )
    presence_penalty: float = setting(
        0.0, Number(-2, 2), "taken from the score of what was said; 0: none", DECODING, off=0, rare=True
    )
    frequency_penalty: float = setting(
        0.0, Number(-2, 2), "the same for each time it was said; 0: none", DECODING, off=0, rare=True
    )
    penalty_window: int = setting(
        0, Whole(0, _MANY), "last tokens that the penalties see; 0: all", DECODING, off=0, rare=True
    )
    typical_p: float = setting(
        1.0,
        Number(0, 1, without_low=True),
        "sample from this share of the least surprising; 1: all",
        DECODING,
        off=1,
        rare=True,
    )
    no_repeat_ngram: int = setting(
        0, Whole(0, _MANY), "never repeat an n-gram of this length; 0: off", DECODING, off=0, rare=True
    )
    logit_bias: tuple[tuple[int | str, float], ...] = setting(
        (), BIAS, "added to the scores of tokens, by id or text; -100: never", DECODING, off=(), rare=True
    )
    max_new_tokens: int = setting(128, Whole(1, _MANY), "longest answer, in tokens", DECODING, short="length")
    seed: int = setting(42, SEED, "seed; random draws one", DECODING)
    coupling: str = setting(
        "rejection",
        Choice(("rejection", "gumbel")),
        "how sampled drafts are verified; gumbel keeps plain decoding's text",
        DECODING,
        rare=True,
    )
    draft_sampling: str = setting(
        "law",
        Choice(("law", "greedy")),
        "law: draw drafts from the drafter's distribution; greedy: take its likeliest token",
        DECODING,
        rare=True,
    )
    verify: str = setting(
        "token", Choice(("token", "block")), "verify drawn drafts token by token, or as blocks", DECODING, rare=True
    )
    expand: str = setting(
        "auto",
        Choice(("auto", "none", "dynamic")),
        "grow drafts into trees of the likeliest nodes; auto: the fastest way",
        DECODING,
        off="none",
        rare=True,
    )
    suffix: str = setting(
        "auto",
        Choice(("auto", "on", "off")),
        "look up earlier answers too, where matches are looked up; auto: in the console, not in bench",
        DECODING,
        rare=True,
    )
    nodes: int = setting(24, Whole(1, 64), "most draft nodes of a round, where drafts are trees", DECODING, rare=True)
    glide_offset: int = setting(
        0, Whole(0, 64), "added to the positions of what GLIDE drafts", DECODING, off=0, rare=True
    )
    system: str = setting("", Text(), "system prompt", DECODING)
    chat: bool = setting(True, SWITCH, "use the model's chat template", DECODING)
    template: str = setting(
        AUTO, Choice(NAMES, suggests=True), "chat template; auto: the model's own", DECODING, off="plain"
    )
    stop: tuple[str, ...] = setting((), TEXTS, "a text before which the answer ends (repeatable)", DECODING, off=())
    grammar: str = setting("", _FILE, "file of a grammar that the answer follows, in Lark or GBNF", DECODING, off="")
    json_schema: str = setting(
        "",
        Text("FILE|TEXT"),
        "JSON schema that the answer follows, or a file of one",
        DECODING,
        short="json",
        off="",
    )
    regex: str = setting("", Text("RE"), "regular expression that the answer follows", DECODING, off="")
    special_tokens: bool = setting(
        False, SWITCH, "let control tokens in messages through; off: they are text", DECODING, rare=True
    )
    ngram_n: int = setting(3, Whole(2, 16), "longest n-gram looked up", NGRAM, rare=True)
    ngram_multi_level: bool = setting(True, SWITCH, "fall back to shorter n-grams", NGRAM, rare=True)
    ngram_filler: int = setting(
        3, Whole(1, 64), "also count the target's k likeliest tokens; 1: only what it wrote", NGRAM, off=1, rare=True
    )
    ngram_stop_if_unknown: bool = setting(True, SWITCH, "stop drafting at an unknown n-gram", NGRAM, rare=True)
    ngram_reset: bool = setting(True, SWITCH, "forget the n-grams between answers", NGRAM, rare=True)
    cascade: tuple[str, ...] = setting(
        (), DRAFTER_NAMES, "drafters of the lanes cascade and chain, large to small", CASCADE, off=(), rare=True
    )
    k_matrix: tuple[tuple[int, ...], ...] = setting(
        (), K_MATRIX, "tokens each drafter adds; first row: for the target", CASCADE, off=(), rare=True
    )
    lenience: float = setting(
        1.0, Number(1, _MANY), "leniency of the drafters' reviews; 1: none", CASCADE, off=1, rare=True
    )
    num_beams: int = setting(4, Whole(1, 64), "texts that the lane beam grows at a time", BEAM, rare=True)
    beam_top_k: int = setting(
        0, Whole(0, _MANY), "tokens each may go on with; 0: all that can count", BEAM, off=0, rare=True
    )
    min_length: int = setting(0, Whole(0, _MANY), "least tokens of a beam's answer", BEAM, off=0, rare=True)
    length_penalty: float = setting(1.2, Number(0, 10), "0: none; more: longer answers win", BEAM, off=0, rare=True)
    compare: tuple[str, ...] = setting(("ar", "spec"), LANE_NAMES, "lanes; the last carries the chat", OUTPUT)
    view: str = setting("auto", Choice(("auto", "side", "stack", "trace")), "how the lanes are laid out", OUTPUT)
    thinking: str = setting(
        "fold",
        Choice(("show", "fold", "hide")),
        "a model's thinking: dim, as one line, or not at all",
        OUTPUT,
        off="hide",
    )
    render: bool = setting(True, SWITCH, "draw Markdown and code of a finished answer", OUTPUT, rare=True)
    slow: float | str = setting(
        1.0, Number(1, 1000, "step"), "factor by which the race is slowed; step: phase by phase", OUTPUT, off=1
    )
    color: str = setting("auto", Choice(("auto", "always", "never")), "when to use colour", OUTPUT, off="never")
    palette: str = setting(
        "default", Choice(("default", "cb")), "colours; cb: for colour-blind eyes", OUTPUT, rare=True
    )
    ascii: bool = setting(False, SWITCH, "draw with plain ASCII", OUTPUT, rare=True)
    quiet: bool = setting(False, SWITCH, "answers only", OUTPUT)
    keep: bool = setting(
        True, SWITCH, "keep typed lines, and the chat when a signal ends it, on disk", OUTPUT, rare=True
    )
    data_dir: str = setting("", Text("DIR", "a folder"), "folder of the data sets that have a name", OUTPUT)
    verbose: bool = setting(False, SWITCH, "more detail, tracebacks of errors", OUTPUT)
    debug: bool = setting(False, SWITCH, "show details of every round", OUTPUT, rare=True)
    log_top: int = setting(
        0, Whole(0, 32), "likeliest tokens of each position that files keep; 0: none", OUTPUT, off=0, rare=True
    )
    record: str = setting("", _FILE, "write everything decoded to this file, for replay", OUTPUT, also="log", off="")

    @property
    def form(self) -> tuple[str, str] | None:
        """The setting that gives the answer a form, and its value; None without one."""
        return next(((name, getattr(self, name)) for name in FORMS if getattr(self, name)), None)

    @property
    def steps(self) -> bool:
        """Whether a race stops after each phase of a round."""
        return self.slow == "step"

    @property
    def times_slower(self) -> float:
        """The factor by which a race is shown slower than it was."""
        return self.slow if isinstance(self.slow, float) else 1.0


MODEL_FIELDS: Mapping[str, Field] = ModelOptions.fields()
SETTING_FIELDS: Mapping[str, Field] = Settings.fields()
FIELDS: Mapping[str, Field] = {**MODEL_FIELDS, **SETTING_FIELDS}


def arguments(fields: Mapping[str, Field], given: SettingValues, **more: Any) -> Namespace:
    """Return the values of a command's own flags, each as given or else its default; files as paths.

    UsageError names the flag.
    """
    values = {
        name: field.read(given[name], label=field.flag) if name in given else field.default
        for name, field in fields.items()
    }
    paths = {
        name: Path(os.path.expanduser(value))
        for name, value in values.items()
        if name in FILES and value and value not in fields[name].kind.choices
    }
    return Namespace(**(values | paths | more))


def from_environment(environ: Mapping[str, str], fields: Mapping[str, Field]) -> SettingValues:
    """Read the values of SPEC_* variables (empty ones count as unset), and `offline` of HF_HUB_OFFLINE too. UsageError
    names the variable."""
    values = {
        field.name: field.read(environ[field.variable], label=field.variable)
        for field in fields.values()
        if environ.get(field.variable)
    }
    if "offline" in fields and environ.get("HF_HUB_OFFLINE", "").lower() not in ("", "0", "off", "no", "false"):
        values.setdefault("offline", True)
    return values


def from_flags(flags: SettingValues, fields: Mapping[str, Field]) -> SettingValues:
    """Read the values of the flags that belong to `fields`; UsageError names the flag."""
    return {name: each.read(flags[name], label=each.flags[0]) for name, each in fields.items() if name in flags}


def from_pair(values: SettingValues) -> SettingValues:
    """Read the values that models.yaml has for a pair; UsageError for a wrong one (utils/catalogue/catalogue.py has
    refused those of a file before, with its line)."""
    return {Settings.field(name).name: Settings.field(name).read(value) for name, value in values.items()}


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one warning for each SPEC_* variable whose name is nearly that of a setting, SPEC_CACHE_DIR or
    SPEC_KERNELS."""
    names = {
        **{name: field.name for field in FIELDS.values() for name in (field.short, field.also, field.name) if name},
        **{"cache_dir": "cache_dir", "kernels": "kernels"},  # variables without a setting, read where they are used
    }
    known = {f"SPEC_{name.upper()}" for name in names.values()}
    unknown = sorted(name for name in environ if name.startswith("SPEC_") and name not in known)
    near = {name: nearest(name[5:], names) for name in unknown}
    return [f"{name} is not a setting (did you mean SPEC_{names[n].upper()}?)" for name, n in near.items() if n]


def model_options(environ: Mapping[str, str], flags: SettingValues) -> ModelOptions:
    """Return the options of the layers built in < environment < flags."""
    return ModelOptions(**{**from_environment(environ, MODEL_FIELDS), **from_flags(flags, MODEL_FIELDS)})


@dataclass(frozen=True)
class Layers:
    """The values of settings by origin, lowest first, as :meth:`of` has read them."""

    pair: SettingValues = field(default_factory=dict)
    environment: SettingValues = field(default_factory=dict)
    flags: SettingValues = field(default_factory=dict)
    console: SettingValues = field(default_factory=dict)  # changes by /set and the like

    @classmethod
    def of(
        cls,
        pair_defaults: SettingValues = MappingProxyType({}),
        environ: Mapping[str, str] = MappingProxyType({}),
        flags: SettingValues = MappingProxyType({}),
    ) -> Self:
        """Read every layer; UsageError names the variable, the flag or the catalogue."""
        environment = from_environment(environ, SETTING_FIELDS)
        return cls(from_pair(pair_defaults), environment, from_flags(flags, SETTING_FIELDS))

    @cached_property
    def defaults(self) -> Settings:
        """The settings that /reset restores: everything below /set."""
        return Settings(**{**self.pair, **self.environment, **self.flags})

    @cached_property
    def settings(self) -> Settings:
        """All layers together; UsageError for settings that exclude each other."""
        settings = self.defaults.changed(**self.console)
        _check_together(settings)
        return settings

    def resolve(self, pair_defaults: SettingValues) -> Self:
        """Return the same layers over another pair's defaults; UsageError when those are wrong."""
        layers = replace(self, pair=from_pair(pair_defaults))
        _check_together(layers.settings)
        return layers

    def with_console_changes(self, **changes: object) -> Self:
        """Return layers with these console changes on top, all or none of them; UsageError names the present values."""
        after = self.settings.changed(**changes)
        _check_together(after, f" (still verify {self.settings.verify}, expand {self.settings.expand})")
        names = [Settings.field(name).name for name in changes]
        return replace(self, console={**self.console, **{name: getattr(after, name) for name in names}})

    def without_console_changes(self, *names: str) -> Self:
        """Return layers without the console's changes of these settings (of all when none is named)."""
        gone = {Settings.field(name).name for name in names} or set(self.console)
        return replace(self, console={name: value for name, value in self.console.items() if name not in gone})


def _check_together(settings: Settings, current: str = "") -> None:
    """Raise UsageError for settings that exclude each other; `current` names the present values."""
    forms = [name for name in FORMS if getattr(settings, name)]
    raise_first(
        {
            f"verify block judges chains, expand dynamic grows trees: choose verify token or expand none{current}": (
                settings.verify == "block" and settings.expand == "dynamic"
            ),
            f"an answer has one form: choose {enumerated(forms or FORMS)}, and switch the others off": len(forms) > 1,
        }
    )
