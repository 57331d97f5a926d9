"""Settings: frozen records that validate themselves, and the layers they come from.

:class:`Settings` is what changes while the console runs; :class:`ModelOptions` says which models to load and
how. Values are checked by the table in app/settings/table.py, so that every way of setting one gives the same error.
Knows nothing about the command line's grammar, models or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from app.settings.table import FIELDS, MODEL_FIELDS, SETTING_FIELDS, Field, default, setting
from app.settings.types import did_you_mean, nearest
from utils.errors import UsageError


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """Every value goes through its field; a wrong one raises UsageError, also straight from the constructor."""
        return {name: cls._field(name).read(value) for name, value in dict(data).items()}

    @classmethod
    def _field(cls, name: str) -> Field:
        raise NotImplementedError

    def changed(self, **changes: object) -> Self:
        """A copy with these values (text or plain); UsageError, with what still holds, when one is refused."""
        fields = {name: self._field(name) for name in changes}
        read = {f.name: f.read(changes[name], still=getattr(self, f.name)) for name, f in fields.items()}
        return self.model_copy(update=read)


class Settings(_Record):
    """How to decode and what to show; see app/settings/table.py for ranges."""

    gamma: int | str = default("gamma")
    temperature: float = default("temperature")
    top_p: float = default("top_p")
    top_k: int = default("top_k")
    min_p: float = default("min_p")
    repetition_penalty: float = default("repetition_penalty")
    no_repeat_ngram: int = default("no_repeat_ngram")
    max_new_tokens: int = default("max_new_tokens")
    seed: int = default("seed")
    coupling: str = default("coupling")
    draft_sampling: str = default("draft_sampling")
    verify: str = default("verify")
    expand: str = default("expand")
    nodes: int = default("nodes")
    system: str = default("system")
    chat: bool = default("chat")
    template: str = default("template")
    ngram_n: int = default("ngram_n")
    ngram_multi_level: bool = default("ngram_multi_level")
    ngram_filler: int = default("ngram_filler")
    ngram_stop_if_unknown: bool = default("ngram_stop_if_unknown")
    ngram_reset: bool = default("ngram_reset")
    cascade: tuple[str, ...] = default("cascade")
    k_matrix: tuple[tuple[int, ...], ...] = default("k_matrix")
    lenience: float = default("lenience")
    num_beams: int = default("num_beams")
    beam_top_k: int = default("beam_top_k")
    min_length: int = default("min_length")
    length_penalty: float = default("length_penalty")
    compare: tuple[str, ...] = default("compare")
    view: str = default("view")
    color: str = default("color")
    palette: str = default("palette")
    ascii: bool = default("ascii")
    quiet: bool = default("quiet")
    data_dir: str = default("data_dir")
    verbose: bool = default("verbose")
    debug: bool = default("debug")
    record: str = default("record")

    @classmethod
    def _field(cls, name: str) -> Field:
        return setting(name)

    def show(self, name: str) -> str:
        """The value of one setting as a user would type it."""
        found = setting(name)
        return found.show(getattr(self, found.name))


class ModelOptions(_Record):
    """Which models to load and how; None leaves it to the pair or to the loader."""

    pair: str | None = default("pair")
    models: str | None = default("models")
    target: str | None = default("target")
    drafter: str | None = default("drafter")
    device: str = default("device")
    drafter_device: str | None = default("drafter_device")
    tp_size: int | str = default("tp_size")
    dtype: str = default("dtype")
    quantization: str = default("quantization")
    drafter_quantization: str = default("drafter_quantization")
    attn_implementation: str | None = default("attn_implementation")
    revision: str | None = default("revision")
    trust_remote_code: bool = default("trust_remote_code")
    offline: bool = default("offline")

    @classmethod
    def _field(cls, name: str) -> Field:
        if name not in MODEL_FIELDS:
            raise UsageError(f"unknown model option {name!r}{did_you_mean(name, MODEL_FIELDS)}")
        return MODEL_FIELDS[name]


Values = Mapping[str, Any]
_FALSE = {"", "0", "off", "no", "false"}


def from_environment(environ: Mapping[str, str], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The values of SPEC_* variables (empty ones count as unset); UsageError names the variable."""
    given = {f: environ[f.variable] for f in fields.values() if environ.get(f.variable)}
    values = {f.name: f.read(text, label=f.variable) for f, text in given.items()}
    if "offline" in fields and environ.get("HF_HUB_OFFLINE", "").lower() not in _FALSE:
        values.setdefault("offline", True)
    return values


def from_flags(flags: Values, fields: Mapping[str, Field]) -> dict[str, Any]:
    """The values of the flags that belong to `fields`; UsageError names the flag."""
    given = {fields[name]: value for name, value in flags.items() if name in fields}
    return {f.name: f.read(value, label=f"--{f.name.replace('_', '-')}") for f, value in given.items()}


def _from_catalogue(values: Values, where: str) -> dict[str, Any]:
    try:
        return {setting(name).name: setting(name).read(value) for name, value in values.items()}
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """One warning for each SPEC_* variable that nearly names a setting but does not."""
    known = {f.variable for f in FIELDS.values()}
    unknown = sorted(name for name in environ if name.startswith("SPEC_") and name not in known)
    near = {name: nearest(name[5:], [f[5:].lower() for f in known]) for name in unknown}
    return [f"{name} is not a setting (did you mean SPEC_{n.upper()}?)" for name, n in near.items() if n]


def model_options(environ: Mapping[str, str], flags: Values) -> ModelOptions:
    """Built in < environment < flags."""
    return ModelOptions(**{**from_environment(environ, MODEL_FIELDS), **from_flags(flags, MODEL_FIELDS)})


@dataclass(frozen=True)
class Layers:
    """Where the settings come from, lowest first; values are already read. Make one with :meth:`of`."""

    catalogue: Values = field(default_factory=dict)
    pair: Values = field(default_factory=dict)
    environment: Values = field(default_factory=dict)
    flags: Values = field(default_factory=dict)
    console: Values = field(default_factory=dict)  # what /set and its like changed

    @classmethod
    def of(
        cls,
        catalogue_defaults: Values | None = None,
        pair_defaults: Values | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Values | None = None,
    ) -> Layers:
        """Read every layer; UsageError names the variable, the flag or the place in the catalogue."""
        return cls(
            catalogue=_from_catalogue(catalogue_defaults or {}, "defaults of the catalogue"),
            pair=_from_catalogue(pair_defaults or {}, "defaults of the pair"),
            environment=from_environment(environ or {}, SETTING_FIELDS),
            flags=from_flags(flags or {}, SETTING_FIELDS),
        )

    @cached_property
    def defaults(self) -> Settings:
        """What /reset goes back to: everything below /set."""
        return Settings(**{**self.catalogue, **self.pair, **self.environment, **self.flags})

    @cached_property
    def settings(self) -> Settings:
        """All layers together; UsageError where they do not go together."""
        found = self.defaults.changed(**self.console)
        _check_together(found)
        return found

    def resolve(self, pair_defaults: Values) -> Layers:
        """The same layers over another pair's defaults; UsageError when those are wrong."""
        found = replace(self, pair=_from_catalogue(pair_defaults, "defaults of the pair"))
        _check_together(found.settings)
        return found

    def with_set(self, **changes: object) -> Layers:
        """With these console changes on top, all or none of them; UsageError with what still holds."""
        after = self.settings.changed(**changes)
        _check_together(after, f" (still verify {self.settings.verify}, expand {self.settings.expand})")
        names = [setting(name).name for name in changes]
        return replace(self, console={**self.console, **{name: getattr(after, name) for name in names}})

    def without_set(self, *names: str) -> Layers:
        """Without the console's changes of these settings (of all when none is named)."""
        gone = {setting(name).name for name in names} or set(self.console)
        return replace(self, console={name: value for name, value in self.console.items() if name not in gone})

    def source(self, name: str) -> str:
        """Which layer a setting's value comes from: "built in", "catalogue", "pair", "environment", "flag", "/set"."""
        layers = {"/set": self.console, "flag": self.flags, "environment": self.environment, "pair": self.pair}
        found = setting(name).name
        return next((label for label, values in layers.items() if found in values), self._below(found))

    def _below(self, name: str) -> str:
        return "catalogue" if name in self.catalogue else "built in"


def _check_together(settings: Settings, still: str = "") -> None:
    """UsageError for settings that exclude each other; `still` says what holds."""
    if settings.verify == "block" and settings.expand in ("cape", "dynamic"):
        raise UsageError(
            f"verify block judges chains, expand {settings.expand} grows trees:"
            f" choose verify token or expand none{still}"
        )


def resolve(
    catalogue_defaults: Values | None,
    pair_defaults: Values | None,
    environ: Mapping[str, str] | None,
    flags: Values | None,
) -> Settings:
    """Built in < catalogue < pair < environment SPEC_* < flags."""
    return Layers.of(catalogue_defaults, pair_defaults, environ, flags).settings
