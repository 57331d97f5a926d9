"""Ways of drafting, one file each; see :class:`sampling.types.Drafter`."""

from sampling.drafters.cascade import CascadeDrafter
from sampling.drafters.chain import ChainDrafter
from sampling.drafters.feature import FeatureDrafter
from sampling.drafters.glide import GlideLM
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.model import ModelDrafter
from sampling.drafters.ngram import NgramDrafter, NgramStore
from sampling.drafters.none import NoDrafter
from sampling.drafters.tables import StaticTables, TablesDrafter

__all__ = [
    "CascadeDrafter",
    "ChainDrafter",
    "FeatureDrafter",
    "GlideLM",
    "MaxGramDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NgramStore",
    "NoDrafter",
    "StaticTables",
    "TablesDrafter",
]
