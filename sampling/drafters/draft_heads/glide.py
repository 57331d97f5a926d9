"""GLIDE: a drafter that reads its target's keys and values (Du et al., arXiv 2402.02082).

`GlideLM` is a language model like any other: `ModelDrafter` drafts from it, and it can review chains.
In every pass its session attends to the keys and values that the target's session holds then; these are not copied.
Knows nothing of how the target computes them.

Query at position p sees target keys j < min(p, valid), where the target's cache has `valid` tokens, of a head with a
window the last of these only; position 0 sees key 0; without a key cross-attention adds nothing. A draft head of one
layer caches nothing that depends on the target; a head of several layers computes accepted drafts again (see
sampling/drafters/draft_heads/sessions.py).
"""

import copy

import torch
from torch import Tensor

from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.network import SeenKeys, StudentNetwork, fed_columns
from sampling.drafters.draft_heads.sessions import FollowingLM, FollowingSession
from sampling.drafters.draft_model import of_lm
from sampling.drafters.registry import DraftRequest, Parts
from sampling.models.cache import additive
from sampling.rows import put
from sampling.types import Drafter, Hidden, Rows, Session


class GlideSession(FollowingSession):
    """B rows of a GLIDE head."""

    lm: "GlideLM"

    def final_positions(self, view: int) -> int:
        """Return how many leading positions are final: all for one layer, whose K and V depend on the ids alone; with
        more layers, position p if p ≤ view (position 0 if view > 0)."""
        if len(self.lm.layers) == 1:
            return 1 << 60
        return view + 1 if view else 0

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        network = self.network
        seen, own_positions = self._seen(positions, mask), put(positions, self.device)
        turned = own_positions  # the positions of the rotation
        if self.lm.offset:
            prompt = torch.tensor([len(row) for row in self.initial])[:, None]
            turned = put(positions + self.lm.offset * (positions >= prompt), self.device)
        own = network.run(network.embed(ids), own_positions, mask, self._cache, seen, turned)
        return network.answer(own, keep, self._hidden is not None)

    def _seen(self, positions: Tensor, mask: Tensor | None) -> SeenKeys | None:
        """Return the part of the target's cache seen by queries at positions [B, T] on the host; None if the cache is
        empty."""
        valid = self.target.held()
        if (longest := max(valid)) == 0:
            return None
        kv = [self.target.kv(layer)[:2] for layer in self.lm.layers]
        if positions.numel() == 1:  # the usual pass: one query
            count = min(max(int(positions), 1), longest)
            return SeenKeys([(key[:, :, :count], value[:, :, :count]) for key, value in kv])
        ends = positions.clamp(min=1).minimum(torch.tensor(valid)[:, None])
        window = self.network.window if len(valid) > 1 else 0  # the network itself cuts the window of a single row
        fed = fed_columns(mask, positions).cpu()[:, None] if window else 0
        first = ends + 1 - window - fed if window else torch.zeros_like(ends)
        slot = torch.arange(kv[0][0].shape[2])
        open_ = (slot < ends[..., None]) & (slot >= first[..., None])
        blind = put((ends == 0)[..., None], self.device) if 0 in valid else None
        return SeenKeys(kv, additive(open_, self.network), blind)


class GlideLM(FollowingLM):
    """A GLIDE head as an LM.

    Args:
        student: of kind glide.
        target_layers: the number of the target's layers; the draft head reads the last of them.
        name: its name in events and figures.
        offset: added to the position of each token after the prompt, in the head's own attention and towards the
            target (one published engine adds gamma).
        vocab_size: the number of ids in use (padded vocabularies have more).

    Raises:
        UserError: a draft head of another kind; `open` without a target's session that can be read.
    """

    parts = dict.fromkeys(("glide",), (StudentNetwork, GlideSession))
    reads_kv = True
    keeps = None

    def __init__(
        self,
        student: DraftHead,
        target_layers: int,
        name: str = "glide",
        offset: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(student, name, vocab_size)
        self.layers, self.offset = student.target_layers(target_layers), offset

    def moved(self, offset: int) -> "GlideLM":
        """Return an LM of the same network with another offset."""
        lm = copy.copy(self)
        lm.offset = offset
        return lm

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> FollowingSession:
        """Open a session; with an offset no cache is taken over, since the earlier answer is now part of the prompt."""
        return super().open(prompt, previous=None if self.offset else previous, target=target, hidden=hidden)


def build(pair: Parts, request: DraftRequest) -> Drafter:
    """Build a drafter on the pair's GLIDE head."""
    layers, size = pair.target.network.layers, pair.target.vocab_size
    lm: GlideLM = pair.head("glide", lambda head: GlideLM(head, layers, vocab_size=size))
    return of_lm(lm.moved(request.settings.glide_offset), request)
