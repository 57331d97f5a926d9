"""The prompt's bottom line as text. Imports nothing heavy: it is drawn while torch is still loading."""

from __future__ import annotations

from app.settings import Settings


def gamma_text(settings: Settings, last: int | None) -> str:
    """4, or auto(3) where 3 is what `auto` chose for the last round; auto before the first."""
    return f"auto({last})" if settings.gamma == "auto" and last is not None else str(settings.gamma)


def toolbar(pair: str, settings: Settings, loading: str, used: int, context: int, last: int | None = None) -> str:
    """Pair, progress of loading, settings and context, what matters most first; `last`: gamma of the last round."""
    parts = [f"{pair}: {loading}" if loading else pair]
    parts += [f"gamma {gamma_text(settings, last)}", f"T {settings.temperature:g}", ",".join(settings.compare)]
    if settings.temperature:
        parts.append(f"seed {settings.seed}")
    if context:
        parts.append(f"{used:,} / {context:,} tokens")
    return "  ".join(parts)
