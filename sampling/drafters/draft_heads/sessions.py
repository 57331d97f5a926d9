"""Sessions of draft heads that read their target's session, and of models that draft a block in one pass.

The states that such a draft head computes at a position depend on how many tokens its target had read. A position is
*final* if it was computed with all states that it can ever read; the others (drafted ones) are kept until the target
has read more, then computed again. Knows no kind of draft head.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from sampling.drafters.draft_heads.config import BlockConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.models.causal import CausalLM, CausalSession
from sampling.rows import put
from sampling.types import Draft, DraftTree, Hidden, Rows, Session, states_of
from utils.errors import UserError


class FollowingSession(CausalSession):
    """B rows of a draft head beside the session of its target."""

    network: StudentNetwork
    lm: "FollowingLM"

    def __init__(
        self, network: StudentNetwork, prompt: Rows, vocab_size: int, hidden: Hidden, target: CausalSession
    ) -> None:
        self.target = target
        super().__init__(network, prompt, vocab_size, hidden)

    def _reset(self, rows: int) -> None:
        super()._reset(rows)
        self._views = [0] * rows  # the target's cached tokens at each row's last pass

    def final_positions(self, view: int) -> int:
        """Return how many leading positions are final if they were computed while the target had cached `view` tokens.

        By default position p reads state p − 1, which the target has if p ≤ view.
        """
        return view + 1

    def rollback(self, rows: Rows) -> list[int]:
        """Roll back as :class:`CausalSession` does; drop positions not final if the target's cache has changed."""
        self._settle()
        for tokens, view, held in zip(self._tokens, self._views, self.target.held(), strict=True):
            if view != held:
                del tokens[self.final_positions(view) :]
        return super().rollback(rows)

    def _note(self, feed: Rows, trees: Sequence[DraftTree], ends: list[int]) -> None:
        super()._note(feed, trees, ends)
        self._views = self.target.held()

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._views = [self._views[row] for row in rows.tolist()]


class BlockCausalSession(CausalSession):
    """B rows of a model that drafts a block in one pass, by mask tokens after each row."""

    @property
    def by_path(self) -> bool:
        """Whether a draft's logits depend on the drafts before it."""
        return False

    def draftable(self, length: int) -> int | None:
        return self.lm.block

    def mask_tokens(self, count: int) -> int:
        """Return the number of mask tokens for a block of `count` drafts; the row itself yields the first."""
        return count - 1

    def draft_block(self, rows: Rows, count: int) -> None:
        """Run the pass for `count` drafts after each row; :meth:`logits_after` returns its logits."""
        block = [[self.lm.mask_token_id] * self.mask_tokens(count) for _ in rows]
        undrafted = 1 + self.mask_tokens(self.lm.block) - self.lm.block  # leading rows that yield no draft
        self.logits = self.score_reduced(rows, Draft.of(block))[:, undrafted:]
        self._settle([[] for _ in rows])

    def logits_after(self, places: list[int], paths: Rows) -> Tensor:
        """Return [M, n] logits after M paths of one length: a row's last token, then drafts. `places`: their rows."""
        if len({*places}) == 1:
            return self.logits[places[0], len(paths[0]) - 1].expand(len(places), -1)
        return self.logits[put(places, self.logits.device), len(paths[0]) - 1]

    def confidence(self, places: list[int], paths: Rows) -> list[float] | None:
        """Return the estimated chance that a draft after each of M paths is accepted; None: no estimate."""
        return None


HeadParts = tuple[Callable[[DraftHead], StudentNetwork], Callable[..., FollowingSession]]  # make network and session


class FollowingLM(CausalLM):
    """A base for draft heads that read their target, as LMs. `vocab_size` as in :class:`CausalLM`.

    `parts`: the kinds that it takes, each with its network and session; UserError for another. `keeps`: whether its
    sessions keep the head's own states; None: `open` decides by `hidden`.
    """

    parts: Mapping[str, HeadParts] = {}
    keeps: bool | None = False
    following: Callable[..., FollowingSession]

    def __init__(self, student: DraftHead, name: str = "", vocab_size: int | None = None) -> None:
        config = student.config
        name = name or config.kind
        if config.kind not in self.parts:
            raise UserError(f"{name} needs a draft head of {' or '.join(self.parts)}, got a {config.kind} one")
        network, self.following = self.parts[config.kind]
        super().__init__(network(student), name, vocab_size)
        if config.reads:
            self.reads_hidden = config.reads
        if isinstance(config, BlockConfig):
            self.mask_token_id, self.block = config.mask, config.drafts

    @property
    def reads(self) -> tuple[int, ...]:
        """The states of its target that it reads."""
        return states_of(self.reads_hidden)

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> FollowingSession:
        """Open a session beside `target`, with the cache of `previous` if that fits; `previous` must not be used again.

        UserError if the target has no readable cache, or does not keep the hidden states that the head reads.
        """
        self.check(prompt, target)
        if not isinstance(target, CausalSession) or target.source is not None:  # an encoder's states belong to no row
            kind = "none" if target is None else type(target).__name__
            raise UserError(f"{self.name} reads the cache of its target's session, got {kind}")
        if {*self.reads} - {*target.keeps_hidden}:
            wanted = True if self.reads_hidden == (-1,) else self.reads_hidden
            raise UserError(f"{self.name} reads its target's hidden states: open the target with hidden={wanted}")
        if (
            isinstance(previous, FollowingSession)
            and previous.reusable(self.network, len(prompt), hidden)
            and previous.target.network is target.network
        ):
            previous.target = target
            return self.beside(previous.again(prompt), target)
        kept = hidden if self.keeps is None else self.keeps
        return self.beside(self.following(self.network, prompt, self.vocab_size, kept, target), target)
