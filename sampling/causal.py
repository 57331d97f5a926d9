"""Causal models as the loop takes them: the address that docs/library.md shows of :mod:`sampling.models.causal`."""

from sampling.models.causal import CausalLM, CausalSession

__all__ = ["CausalLM", "CausalSession"]
