"""The table of drafters: one row each.

A row gives a drafter's word (its name in `--drafter` and `--compare`), what a pair (a target and a drafter with their
settings) must have for it, the settings that it depends on and the function that builds it. Lanes, `--drafter`,
`/drafter`, completion, titles, the catalogue's check and the README's table follow from the rows. `a+b` combines the
rows of two. Plain data: a builder's module is imported when the builder is called. Imports no torch.
"""

import re
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from utils.catalogue.heads import HEAD_KINDS
from utils.errors import UsageError

if TYPE_CHECKING:
    from sampling.gamma.ratios import Ratios
    from sampling.types import Drafter

NEEDS = {
    "": "nothing",
    "model": "a drafter model",
    "tables": "n-gram tables",
    "cascade": "its cascade's drafters",
    "mtp": "a target with it",
    **dict.fromkeys(HEAD_KINDS, "a head"),
}
NGRAM = ("ngram_n", "ngram_multi_level", "ngram_filler", "ngram_stop_if_unknown", "ngram_reset")
TREE = ("verify", "expand", "nodes")
LOOKS_UP = (*TREE, "gamma", "suffix")
CASCADE = ("cascade", "k_matrix", "lenience")


@dataclass(frozen=True)
class DrafterRow:
    """A drafter. `build`: "module:function", called with :class:`Parts` and :class:`DraftRequest`.

    `needs`: a key of NEEDS. `settings`: the settings that it depends on (of `gamma` only whether it is `auto`).
    `expand`: the kind of tree under `expand auto`, see DraftRequest. `lane`: the word names a lane (an answer side by
    side with others). `pair`: it is a value of `--drafter`.
    `member`: rank among the words of `--cascade`, large to small; 0: none of them. `reviews`: it may review others
    there. `first`: it may stand before `+`. `short`: its name in a combination. `lm`: "module:name" of the function
    that makes a draft head's LM.
    """

    word: str
    title: str
    help: str
    build: str
    needs: str = ""
    settings: tuple[str, ...] = ()
    expand: str = "none"
    lane: bool = True
    pair: bool = True
    member: int = 0
    reviews: bool = False
    first: bool = False
    short: str = ""
    lm: str = ""


_ALONE = (
    DrafterRow(
        "model",
        "drafter",
        "the pair's drafter model",
        "sampling.drafters.draft_model:build",
        needs="model",
        settings=TREE,
        lane=False,
        pair=False,
        member=1,
        reviews=True,
        short="drafter model",
    ),
    DrafterRow(
        "ngram",
        "n-gram drafts",
        "drafts from n-grams",
        "sampling.drafters.tables.ngram:build",
        settings=NGRAM,
        member=6,
    ),
    DrafterRow(
        "tables",
        "n-gram tables",
        "matches, then n-gram tables",
        "sampling.drafters.tables.lookup:build",
        settings=LOOKS_UP,
        expand="dynamic",
        member=5,
        first=True,
        short="tables",
    ),
    DrafterRow(
        "static",
        "static tables alone",
        "n-gram tables alone",
        "sampling.drafters.tables.lookup:build",
        needs="tables",
        settings=(*TREE, "gamma"),
        expand="dynamic",
        pair=False,
    ),
    DrafterRow(
        "match",
        "matches alone",
        "matches in the conversation",
        "sampling.drafters.tables.lookup:build",
        settings=LOOKS_UP,
        expand="dynamic",
        pair=False,
        first=True,
        short="matches",
    ),
    DrafterRow(
        "suffix",
        "what was said before",
        "matches, in earlier answers too",
        "sampling.drafters.tables.lookup:build",
        settings=LOOKS_UP,
        expand="dynamic",
    ),
    DrafterRow(
        "maxgram",
        "max-gram drafts",
        "the longest match, then bigrams",
        "sampling.drafters.max_gram:build",
        member=7,
    ),
    DrafterRow(
        "plain",
        "plain drafter",
        "a small model trained for the target",
        "sampling.drafters.draft_model:build_head",
        needs="plain",
        lm="sampling.drafters.draft_heads.network:plain_lm",
        settings=(*TREE, "gamma"),
        member=2,
        reviews=True,
        short="plain",
    ),
    DrafterRow(
        "glide",
        "GLIDE drafter",
        "reads the target's keys and values",
        "sampling.drafters.draft_heads.glide:build",
        needs="glide",
        settings=(*TREE, "gamma", "glide_offset"),
        member=3,
        reviews=True,
        short="GLIDE",
    ),
    DrafterRow(
        "feature",
        "feature drafter",
        "reads the target's last hidden state, or several",
        "sampling.drafters.draft_model:build_head",
        needs="feature",
        lm="sampling.drafters.draft_heads.eagle:FeatureLM",
        settings=(*TREE, "gamma"),
        member=4,
        short="feature",
    ),
    DrafterRow(
        "eagle",
        "EAGLE head",
        "EAGLE or EAGLE-3",
        "sampling.drafters.draft_model:build_head",
        needs="eagle",
        lm="sampling.drafters.draft_heads.eagle:FeatureLM",
        settings=(*TREE, "gamma"),
        member=4,
        short="EAGLE",
    ),
    DrafterRow(
        "peagle",
        "P-EAGLE head",
        "P-EAGLE: a block in one pass",
        "sampling.drafters.draft_model:build_head",
        needs="peagle",
        lm="sampling.drafters.draft_heads.dflash:BlockLM",
        settings=(*TREE, "gamma"),
        short="P-EAGLE",
    ),
    DrafterRow(
        "dflash",
        "DFlash head",
        "DFlash: a block in one pass",
        "sampling.drafters.draft_model:build_head",
        needs="dflash",
        lm="sampling.drafters.draft_heads.dflash:BlockLM",
        settings=(*TREE, "gamma"),
        short="DFlash",
    ),
    DrafterRow(
        "jetspec",
        "JetSpec head",
        "JetSpec: DFlash with a causal block",
        "sampling.drafters.draft_model:build_head",
        needs="jetspec",
        lm="sampling.drafters.draft_heads.dflash:BlockLM",
        settings=(*TREE, "gamma"),
        short="JetSpec",
    ),
    DrafterRow(
        "domino",
        "Domino head",
        "Domino: DFlash, a recurrent correction",
        "sampling.drafters.draft_model:build_head",
        needs="domino",
        lm="sampling.drafters.draft_heads.dflash:BlockLM",
        settings=(*TREE, "gamma"),
        short="Domino",
    ),
    DrafterRow(
        "dflare",
        "DFlare head",
        "DFlare: DFlash, a mix for each layer",
        "sampling.drafters.draft_model:build_head",
        needs="dflare",
        lm="sampling.drafters.draft_heads.dflash:BlockLM",
        settings=(*TREE, "gamma"),
        short="DFlare",
    ),
    DrafterRow(
        "dspark",
        "DSpark head",
        "DSpark: the same, a Markov head",
        "sampling.drafters.draft_model:build_head",
        needs="dspark",
        lm="sampling.drafters.draft_heads.dflash:BlockLM",
        settings=(*TREE, "gamma"),
        short="DSpark",
    ),
    DrafterRow(
        "dflash2",
        "DFlash2 head",
        "DFlash2: the same, a selector",
        "sampling.drafters.draft_model:build_head",
        needs="dflash2",
        lm="sampling.drafters.draft_heads.dflash:BlockLM",
        settings=(*TREE, "gamma"),
        short="DFlash2",
    ),
    DrafterRow(
        "mtp",
        "multi-token prediction",
        "the target's next-token layer",
        "sampling.drafters.draft_heads.mtp:build",
        needs="mtp",
        settings=(*TREE, "gamma"),
        short="MTP",
    ),
)
_OF_SEVERAL = (
    DrafterRow(
        "cascade",
        "cascade",
        "drafters that review each other's drafts",
        "sampling.drafters.cascade:build",
        needs="cascade",
        settings=("verify", *CASCADE),
    ),
    DrafterRow(
        "chain",
        "chain",
        "the cascade's drafters, one after the other",
        "sampling.drafters.cascade:build",
        needs="cascade",
        settings=("verify", *CASCADE),
    ),
    DrafterRow(
        "oracle",
        "oracle (simulated)",
        "simulated: the target's own tokens (oracle:.8:c=.1)",
        "sampling.drafters.oracle:build",
        pair=False,
    ),
    DrafterRow("none", "no drafter", "no drafter", "sampling.drafters.draft_model:build_none", lane=False),
)


def _beside(first: DrafterRow, second: DrafterRow) -> DrafterRow:
    """Return the row of `a+b`: look-ups beside a model."""
    return DrafterRow(
        f"{first.word}+{second.word}",
        f"{first.short} and {second.short}",
        f"{first.short}, and {second.word} where they are unsure",
        "sampling.drafters.tables.lookup:build",
        needs=second.needs,
        settings=tuple(dict.fromkeys((*first.settings, *second.settings))),
        expand="joint",
        pair=first.pair and second.pair,
    )


_TOGETHER = [
    _beside(row, head) for row in _ALONE if row.first for head in _ALONE if head.needs in ("model", "mtp", *HEAD_KINDS)
]
ROWS = {row.word: row for row in (*_ALONE, *_TOGETHER, *_OF_SEVERAL)}
LANES = tuple(row.word for row in ROWS.values() if row.lane)
DRAFTERS = tuple(row.word for row in ROWS.values() if row.pair)  # the words of --drafter
_MEMBERS = sorted((row for row in ROWS.values() if row.member), key=lambda row: row.member)
MEMBERS = tuple(row.word for row in _MEMBERS)  # the words of --cascade
REVIEWERS = tuple(row.word for row in _MEMBERS if row.reviews)


_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
_ORACLE = re.compile(rf"oracle(:{_NUMBER}(:c={_NUMBER})?)?", re.ASCII)
LOSSY = "lossy"  # the lane that drafts as the pair does and accepts likely enough tokens; no value of --drafter
ORACLE = "oracle:ALPHA or oracle:ALPHA:c=C, ALPHA from 0 to 1, C from 0 to 10"


class OracleName(NamedTuple):
    """The lane `oracle:ALPHA:c=C`: the probability that a draft is right, and the cost of a drafted token."""

    alpha: float = 0.8
    cost: float = 0.0

    def __str__(self) -> str:
        alpha, cost = (f"{value:g}".replace("0.", ".", value < 1) for value in self)
        return f"oracle:{alpha}" + (f":c={cost}" if self.cost else "")


def oracle_of(word: str) -> OracleName:
    """Parse the word of an oracle lane; UsageError if it is not one."""
    known = _ORACLE.fullmatch(word)
    values = [float(text) for text in (known[2], known[4]) if text] if known else [-1.0]
    oracle = OracleName(*values)
    if not (0 <= oracle.alpha <= 1 and 0 <= oracle.cost <= 10):
        raise UsageError(f"an oracle is {ORACLE}, got {word!r}")
    return oracle


def is_simulated(word: str) -> bool:
    """Whether a lane of this word charges simulated costs."""
    return word.partition(":")[0] == "oracle"


def row_of(word: str) -> DrafterRow:
    """Return the row of a word, which may have values after a colon."""
    return ROWS[word.partition(":")[0]]


def examples() -> list[str]:
    """Return the words of --drafter, with one combination as the example of all."""
    combined = [word for word in DRAFTERS if "+" in word]
    return [word for word in DRAFTERS if word not in combined[:-1]]


def table() -> list[tuple[str, str, str, str]]:
    """Return (word, title, help, needs) of every word that a user may give, without combinations."""
    shown = (row for row in (*_ALONE, *_OF_SEVERAL) if row.lane or row.pair)
    return [(row.word, row.title, row.help, NEEDS[row.needs]) for row in shown]


@dataclass(frozen=True)
class DraftRequest:
    """Parameters for building a drafter.

    `settings`: has the settings that its row names as attributes. `expand`: none (chains), dynamic (best-first trees)
    or joint (best-first trees of look-ups and a model). `auto`: gamma is chosen every round. `ratios`: estimates that
    outlive the drafter.
    """

    word: str
    settings: Any
    expand: str = "none"
    auto: bool = False
    ratios: "Ratios | None" = None


class Parts(Protocol):
    """Parts of a loaded pair that drafters are built from. `head`, `shipped`, `cascade` and `build` raise UserError if
    the pair lacks a part or its file cannot be used, `tables` for the latter alone."""

    target: Any  # the target as an LM: its `vocab_size`, of a loaded one its `network`
    model: Any  # the pair's drafter model as an LM; None if it has none

    def tables(self) -> Any:
        """Return the pair's n-gram tables; None if it names none."""

    def finished(self, request: DraftRequest) -> Any:
        """Return the index of finished answers, if this drafter may use it; else None."""

    def head(self, kind: str, make: Any) -> Any:
        """Return what `make` builds from the pair's draft head of this kind; built once."""

    def shipped(self, kind: str, make: Any) -> Any:
        """Return what `make` builds from the target and the folder of its layers, None = beside it; built once."""

    def cascade(self, request: DraftRequest) -> "tuple[list[Drafter], Any, float]":
        """Return the drafters of the pair's cascade, large to small, its K matrix and its lenience."""

    def build(self, request: DraftRequest) -> "Drafter":
        """Build another drafter of this pair."""


def build(pair: Parts, request: DraftRequest) -> "Drafter":
    """Build a drafter by the function that its row names."""
    return cast("Drafter", resolve_name(row_of(request.word).build)(pair, request))
