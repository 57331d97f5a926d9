"""The score of beams, and the rules by which a beam search keeps them. Pure arithmetic; knows no models, no torch."""

from dataclasses import dataclass
from typing import Literal

from utils.errors import UserError, number, shown, whole

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamPlan:
    """Parameters of a search: score = Σ log p / ((m + len) / (m + 1))^α (Wu et al., arXiv 1609.08144, eq. 14; m = 5).

    Args:
        num_beams: running beams, and finished ones that are kept.
        top_k: tokens by which a beam may grow in a step; 0 = as many as can count.
        min_length: least tokens of an answer before a stop id.
        alpha: length penalty; 0 = none, larger ones favour longer answers.
        offset: the penalty's m; with 0 it is transformers' `length_penalty` of the same α.
        early_stopping: when to stop after `num_beams` have finished, as in transformers. True: at once.
            False: when no running beam, scored as it stands, beats the worst of them. "never": when none could beat it
            by any further growth up to the limit (exact, and the longest).

    Raises:
        UserError: a value outside its range.
    """

    num_beams: int = 4
    top_k: int = 0
    min_length: int = 0
    alpha: float = 1.2
    offset: float = 5.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        whole("num_beams", self.num_beams, 1, "a whole number, at least 1")
        whole("top_k", self.top_k, 0, "a whole number, 0 (as many as count) or more")
        whole("min_length", self.min_length, 0, "a whole number, at least 0")
        number("alpha", self.alpha, lambda alpha: True, "a finite number")
        number("offset", self.offset, lambda offset: offset >= 0, "a finite number, at least 0")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise UserError(f"early_stopping must be True, False or 'never', got {shown(self.early_stopping)}")

    def score(self, log_p: float, length: int) -> float:
        """Return Σ log p of `length` ≥ 1 tokens with the length penalty."""
        penalty: float = ((self.offset + length) / (self.offset + 1)) ** self.alpha
        return log_p / penalty
