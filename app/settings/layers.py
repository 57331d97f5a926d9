"""The layers that settings come from: built in < models.yaml < pair < environment < flags < what the console changed.

Values are checked by their rows in app/settings/table.py. Knows nothing about the command line's grammar, models or
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from app.settings.table import FIELDS, MODEL_FIELDS, SETTING_FIELDS, Field, ModelOptions, Settings
from utils.errors import UsageError, nearest

Values = Mapping[str, Any]
_FALSE = {"", "0", "off", "no", "false"}


def from_environment(environ: Mapping[str, str], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Read the values of SPEC_* variables (empty ones count as unset); UsageError names the variable."""
    given = [field for field in fields.values() if environ.get(field.variable)]
    values = {field.name: field.read(environ[field.variable], label=field.variable) for field in given}
    if "offline" in fields and environ.get("HF_HUB_OFFLINE", "").lower() not in _FALSE:
        values.setdefault("offline", True)
    return values


def from_flags(flags: Values, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Read the values of the flags that belong to `fields`; UsageError names the flag."""
    return {name: each.read(flags[name], label=each.flags[0]) for name, each in fields.items() if name in flags}


def from_pair(values: Values) -> dict[str, Any]:
    """Read the values that models.yaml has for a pair; UsageError names the pair's defaults as their origin."""
    try:
        return {Settings.field(name).name: Settings.field(name).read(value) for name, value in values.items()}
    except UsageError as error:
        raise UsageError(f"defaults of the pair: {error}") from None


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one warning for each SPEC_* variable that nearly names a setting but does not."""
    known = {field.variable for field in FIELDS.values()}
    unknown = sorted(name for name in environ if name.startswith("SPEC_") and name not in known)
    near = {name: nearest(name[5:], FIELDS) for name in unknown}
    return [f"{name} is not a setting (did you mean SPEC_{n.upper()}?)" for name, n in near.items() if n]


def model_options(environ: Mapping[str, str], flags: Values) -> ModelOptions:
    """Return the options of the layers built in < environment < flags."""
    return ModelOptions(**{**from_environment(environ, MODEL_FIELDS), **from_flags(flags, MODEL_FIELDS)})


@dataclass(frozen=True)
class Layers:
    """Where the settings come from, lowest first; values are already read. Make one with :meth:`of`."""

    pair: Values = field(default_factory=dict)
    environment: Values = field(default_factory=dict)
    flags: Values = field(default_factory=dict)
    console: Values = field(default_factory=dict)  # changes by /set and the like

    @classmethod
    def of(
        cls,
        pair_defaults: Values = MappingProxyType({}),
        environ: Mapping[str, str] = MappingProxyType({}),
        flags: Values = MappingProxyType({}),
    ) -> Layers:
        """Read every layer; UsageError names the variable, the flag or the catalogue."""
        given = from_environment(environ, SETTING_FIELDS), from_flags(flags, SETTING_FIELDS)
        return cls(from_pair(pair_defaults), *given)

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

    def resolve(self, pair_defaults: Values) -> Layers:
        """Return the same layers over another pair's defaults; UsageError when those are wrong."""
        layers = replace(self, pair=from_pair(pair_defaults))
        _check_together(layers.settings)
        return layers

    def with_set(self, **changes: object) -> Layers:
        """Return layers with these console changes on top, all or none of them; UsageError names the present values."""
        after = self.settings.changed(**changes)
        _check_together(after, f" (still verify {self.settings.verify}, expand {self.settings.expand})")
        names = [Settings.field(name).name for name in changes]
        return replace(self, console={**self.console, **{name: getattr(after, name) for name in names}})

    def without_set(self, *names: str) -> Layers:
        """Return layers without the console's changes of these settings (of all when none is named)."""
        gone = {Settings.field(name).name for name in names} or set(self.console)
        return replace(self, console={name: value for name, value in self.console.items() if name not in gone})


def _check_together(settings: Settings, still: str = "") -> None:
    """UsageError for settings that exclude each other; `still` names the present values."""
    if settings.verify == "block" and settings.expand == "dynamic":
        raise UsageError(
            f"verify block judges chains, expand dynamic grows trees: choose verify token or expand none{still}"
        )
