"""The teaching view: round by round each draft with q(x), p(x), its chance of acceptance and its fate.

p and q are the probabilities at temperature 1 that the events carry, and are labelled so. Knows no
models and no settings but the rule by which drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len

from app.figures import share
from app.palette import Look
from app.rows import Drawn, Row, field, fit, flow
from app.spans import NO_TEXT, Decode, Window
from app.wrap import visible
from sampling.events import Step

Rule = Literal["argmax", "match", "ratio", "coupled"]

RULES: dict[Rule, str] = {
    "argmax": "greedy: a draft x is accepted if x = argmax p",
    "match": "point mass: the target draws its own token, x is accepted if that is x; chance p(x)",
    "ratio": "x drawn from q is accepted with chance min(1, p(x)/q(x))",
    "coupled": "drafter and target draw with the same noise; x is accepted if both drew it",
}
_WIDE = 60  # columns from which a draft's row has its columns spelled out
_FATES = 40  # columns from which fates are whole words
_TEXT = 18  # columns of a draft's text at most


def rule_of(temperature: float, *, sampled: bool, coupling: str = "rejection", draft_sampling: str = "law") -> Rule:
    """The rule of a lane: `sampled` says that its drafter is a model (tables and n-grams are point masses)."""
    if temperature == 0:
        return "argmax"
    if not sampled or draft_sampling == "greedy":
        return "match"
    return "coupled" if coupling == "gumbel" else "ratio"


class _Draft(NamedTuple):
    """One row of a round."""

    number: int
    text: str
    source: str
    q: float | None
    p: float | None
    fate: str


class Trace(Drawn):
    """The last `last` rounds of an answer (None: all).

    `steps` are one row's rounds from its prefill on, `names` the drafter's names for the sources.
    `exact` says that p and q are the very laws that decided (temperature 1, no filter); otherwise the
    chance is only near.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        decode: Decode,
        look: Look,
        names: Sequence[str] = (),
        *,
        rule: Rule = "argmax",
        last: int | None = None,
        exact: bool = False,
    ) -> None:
        self.steps, self.look, self.names = list(steps), look, tuple(names)
        self.rule, self.exact = rule, exact
        self.first = 0 if last is None else max(0, len(self.steps) - max(0, last))
        self._decode = decode

    def rows(self) -> list[Row]:
        """All rows; only `look.width` bounds them, a trace is for the scrollback."""
        if not self.steps:
            return flow([field("no rounds yet", "faint")], self.look)
        rows = self._head()
        window = Window(self._decode)
        for number, step in enumerate(self.steps):
            drafts, own = self._read(step, window)
            if number >= self.first:
                rows += self._round(number, step, drafts, own)
        return rows

    def _head(self) -> list[Row]:
        near = self._has_chance and not self.exact
        chance = "; the run's own law may differ, chances are near" if near else ""
        texts = [RULES[self.rule], f"q(x), p(x) at temperature 1{chance}"]
        texts += [f"drafts by {self.names[0]}"] if len(self.names) == 1 else []
        return [row for text in texts for row in flow([field(text, "faint")], self.look)]

    def _read(self, step: Step, window: Window) -> tuple[list[_Draft], str]:
        """The drafts of a round as they would have read, and the target's own token."""
        texts = window.ahead(step.drafted)
        examined = [*step.path, *step.rejected]
        figures = {node: pair for node, *pair in zip(examined, step.draft_p, step.target_p, strict=False)}
        fates = dict.fromkeys(step.path, "accepted") | dict.fromkeys(step.rejected, "rejected")
        drafts = []
        for node, text in enumerate(texts):
            q, p = figures.get(node, (None, None))
            drafts.append(_Draft(node + 1, text, self._source(step, node), q, p, fates.get(node, "discarded")))
        for token in step.accepted:
            window.push(token)
        own = window.ahead([step.token])[0] if step.token is not None else ""
        if step.token is not None:
            window.push(step.token)
        return drafts, own

    def _source(self, step: Step, node: int) -> str:
        if len(self.names) < 2 or node >= len(step.source):
            return ""
        index = step.source[node]
        return self.names[index] if 0 <= index < len(self.names) else str(index)

    def _round(self, number: int, step: Step, drafts: list[_Draft], own: str) -> list[Row]:
        name = "prefill" if number == 0 and not step.drafted else f"round {number}"
        parts = [field(name, "strong")]
        if step.drafted or number:
            parts += [field(f"{self.look.glyph('gamma')} {step.gamma}", "faint")]
            parts += [
                field(f"accepted {len(step.path)}/{len(step.drafted)}" if step.drafted else "nothing drafted", "faint")
            ]
        parts += [field(f"{step.seconds * 1000:.1f} ms", "faint")]
        rows = flow(parts, self.look, 2)
        for draft in drafts:
            rows += self._draft(draft)
        return rows + self._own(step, own, bool(drafts))

    def _own(self, step: Step, own: str, drafted: bool) -> list[Row]:
        if step.token is None:
            return flow([field("  "), field("ended by an accepted stop token", "faint")], self.look, 4)
        role = "correction" if step.rejected else "bonus" if drafted else "own token"
        words = f"from the target ({role}), top-2 gap" if self._wide else "target, gap"
        fields = [field("  "), field(self._quoted(own), "target"), field(f"{words} {step.top2_gap:.3f}", "faint")]
        return flow(fields, self.look, 4)

    def _draft(self, draft: _Draft) -> list[Row]:
        quoted = self._quoted(draft.text)
        pad = " " * (_TEXT - cell_len(quoted)) if self._wide else ""
        fields = [field(f"{draft.number:>2}"), field(quoted, draft.fate), field(pad, "plain", "")]
        fields += [field(text) for text in self._figures(draft)]
        fate = draft.fate if self.look.width >= _FATES else draft.fate[:3]
        fields.append(field(fate, "strong" if draft.fate == "rejected" else draft.fate))
        if draft.source:
            fields.append(field(draft.source, "faint"))
        return flow([item for item in fields if item.width], self.look, 4)

    def _figures(self, draft: _Draft) -> list[str]:
        if draft.q is None or draft.p is None:
            return ["not examined".ljust(27 if self._has_chance else 14)] if self._wide else []
        chance = share(self._chance(draft.q, draft.p)) if self._has_chance else ""
        if not self._wide:
            return [f"q{share(draft.q)} p{share(draft.p)}" + (f" ch{chance}" if chance else "")]
        figures = [f"q {share(draft.q):>4}", f"p {share(draft.p):>4}"]
        return [*figures, f"chance {chance:>4}"] if chance else figures

    @property
    def _wide(self) -> bool:
        return self.look.width >= _WIDE

    @property
    def _has_chance(self) -> bool:
        return self.rule in ("match", "ratio")

    def _chance(self, q: float, p: float) -> float:
        # Theorem (Leviathan 2023): accepting x ~ q with min(1, p/q) leaves p(x) unchanged.
        return p if self.rule == "match" else min(1.0, p / q) if q > 0 else 0.0

    def _quoted(self, text: str) -> str:
        """A token's text in quotes on one line, spaces kept."""
        text = visible(text, self.look.ascii).replace("\n", self.look.glyph("newline")).replace("\t", " ")
        text = "<end>" if text == NO_TEXT and self.look.ascii else text
        return f'"{fit(text, min(_TEXT - 2, max(2, self.look.width - 8)), self.look)}"'
