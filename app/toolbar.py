"""The prompt's bottom line as text. Imports nothing heavy: it is drawn while torch is still loading."""

from __future__ import annotations

from app.settings import Settings


def toolbar(pair: str, settings: Settings, loading: str, used: int, context: int) -> str:
    """Pair, progress of loading, settings and context, what matters most first."""
    parts = [f"{pair}: {loading}" if loading else pair]
    parts += [f"gamma {settings.gamma}", f"T {settings.temperature:g}", ",".join(settings.compare)]
    if settings.temperature:
        parts.append(f"seed {settings.seed}")
    if context:
        parts.append(f"{used:,} / {context:,} tokens")
    return "  ".join(parts)
