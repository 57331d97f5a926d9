"""Ways of drafting, one file each; see :class:`sampling.types.Drafter`."""
