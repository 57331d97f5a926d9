"""Chat templates: the address that docs/library.md shows of :mod:`utils.catalogue.templates`."""

from utils.catalogue.templates import render

__all__ = ["render"]
