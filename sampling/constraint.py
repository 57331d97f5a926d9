"""A form for the answer: the ids that can follow each prefix, also inside a draft. The logits of target and drafter get
the same mask, so the text equals constrained decoding without drafts. Knows a form's states (`FormState` in
sampling/types.py), no grammars and no text.
"""

import torch
from torch import Tensor

from sampling.rows import common_prefix
from sampling.types import FormState, Rows
from sampling.vocabulary import single_thread_if_small
from utils.errors import UserError


class FormConstraint:
    """The states of one form over the texts of an answer. `state`: at the answer's beginning."""

    def __init__(self, state: FormState) -> None:
        self._state = state
        self._answers: list[tuple[list[int], list[int], list[FormState | None]]] = []  # prompt, tokens, states

    def begin(self, rows: Rows) -> None:
        """Begin answers to these rows; a run nested in another one continues the outer run's answers. UserError if one
        prompt is the beginning of another: a text would have two states."""
        self._answers = self._answers or [([*row], [], [self._state]) for row in dict.fromkeys(map(tuple, rows))]
        prompts = [prompt for prompt, *_ in self._answers]
        if any(long[: len(short)] == short for short in prompts for long in prompts if long is not short):
            raise UserError("prompts decoded together under a grammar must not be the beginnings of others")

    def at(self, prefix: list[int]) -> FormState | None:
        """Return the state after a prompt and its answer so far; None after tokens that cannot follow, after the end,
        and for another prompt."""
        for prompt, known, states in self._answers:
            if prefix[: len(prompt)] == prompt:
                tokens = prefix[len(prompt) :]
                count = common_prefix(known, tokens)
                del states[count + 1 :]
                for token in tokens[count:]:
                    states.append(None if states[-1] is None else states[-1].after(token))
                known[count:] = tokens[count:]
                return states[-1]
        return None

    def masked(self, logits: Tensor, prefixes: Rows, ids: Tensor | None = None) -> Tensor:
        """Return logits [..., n] with -inf for ids that cannot follow their prefixes. If all ids that can follow have
        -inf already, they become equally likely; a row in which no id can follow stays as it is.

        `ids` [n]: the id of each column; None: all ids.
        """
        flat, states = logits.reshape(-1, logits.shape[-1]), list(map(self.at, prefixes))
        with single_thread_if_small(logits.numel()):
            some, none = slice(None) if ids is None else ids.cpu(), torch.zeros(flat.shape[-1], dtype=torch.bool)
            refused = torch.stack([none if state is None else state.refused[some] for state in states]).to(flat.device)
            kept = flat.masked_fill(refused, -torch.inf)
            if not bool((left := kept.amax(dim=-1, keepdim=True) > -torch.inf).all()):
                lacking = refused.all(dim=-1, keepdim=True)
                kept = kept.where(left, torch.zeros_like(flat).masked_fill(refused, -torch.inf)).where(~lacking, flat)
            return kept.view(logits.shape)
