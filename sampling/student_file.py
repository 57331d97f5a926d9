"""Draft heads on disk: the address that docs/library.md shows of :mod:`sampling.drafters.draft_heads.checkpoint`."""

from sampling.drafters.draft_heads.checkpoint import load_student, save_student

__all__ = ["load_student", "save_student"]
