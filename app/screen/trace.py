"""The teaching view: round by round each draft with q(x), p(x), its chance of acceptance, its coin or draw, its fate.

A coin is the uniform random number in (0, 1) that accepts the draft if it is less than the chance. p and q are those
that the rule compared, where that was recorded, else at temperature 1, and are labelled so. Each review of a cascade
has a line before the round's drafts: who reviewed whose drafts, and how many it passed. Knows no models and no settings
but the rule by which drafts were accepted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from rich.cells import cell_len

from app.lanes.answers import RULES, LaneRule, chance
from app.screen.palette import Look, tint
from app.screen.rows import Chunk, Drawn, Lines, Row, chunk, flow, plural, quoted, share
from app.screen.terminal import Action
from app.settings.types import enumerated
from sampling.events import Step
from utils.errors import UserError
from utils.growing_text import Decode, Window
from utils.objects import Json

_MAX_TEXT, _MIN_TEXT = 18, 8  # most and fewest columns of a draft's text
_ASCII_LINES = str.maketrans("├│└─", "||`-")
DRAFTED, SCORED, ACCEPTED = range(3)  # how far a round has come
_TIMES = (("draft", "accepted"), ("verify", "target"), ("sample", "question"), ("other", "faint"))  # with their roles
_INDENT = 2  # columns by which each level of reviews is indented


class Drafted(NamedTuple):
    """One draft of a round. q, p, `source`, the `chance` of acceptance and the number of the `coin` are None if they
    are not known, such as q and p of a draft that was neither examined nor recorded.

    `branch`: the lines of the tree before its text; "" in a chain.
    """

    number: int
    text: str
    source: int | None
    q: float | None
    p: float | None
    fate: str  # accepted, rejected or discarded
    branch: str = ""
    chosen: bool = False  # not drawn from q (such as the drafter's likeliest token): accepted with chance p
    chance: float | None = None
    coin: float | None = None
    compared: tuple[float, float] | None = None  # q and p after the settings, as the rule compared them


@dataclass(frozen=True, slots=True)
class TracedRound:
    """A round with its texts. `token_text`: of the correction or bonus token ("" if a draft ended the row)."""

    step: Step
    drafts: tuple[Drafted, ...]
    token_text: str


def read(step: Step, window: Window) -> TracedRound:
    """Return a round with its texts, which follow the tokens in `window`, and add its emitted tokens to the window.

    The text of a character that is split over uncommitted tokens is approximate.
    """
    texts = _texts(step, window)
    draft_p, target_p = (
        dict(zip((*step.path, *step.rejected), probs, strict=False)) for probs in (step.draft_p, step.target_p)
    )
    for node, odds in enumerate(step.odds):
        target_p.setdefault(node, odds.p)
        draft_p.setdefault(node, odds.q)
    compared = {
        trial.node: (draft_p.get(trial.node, 1.0) if trial.q is None else trial.q, trial.p)
        for trial in step.trials
        if trial.p is not None
    }
    fates = dict.fromkeys(step.path, "accepted") | dict.fromkeys(step.rejected, "rejected")
    sources, chances = dict(enumerate(step.source)), trials_by_node(step)
    drafts = [
        Drafted(
            node + 1,
            texts[node],
            sources.get(node),
            draft_p.get(node),
            target_p.get(node),
            fates.get(node, "discarded"),
            branch,
            step.chosen,
            chance=chances.get(node, NO_TRIAL)[0],
            coin=chances.get(node, NO_TRIAL)[1],
            compared=compared.get(node),
        )
        for node, branch in (_downwards(step) if step.is_tree else ((node, "") for node in range(len(texts))))
    ]
    token_text = "" if step.token is None else window.ahead(step.emitted)[-1]
    for token in step.emitted:
        window.push(token)
    return TracedRound(step, tuple(drafts), token_text)


def _texts(step: Step, window: Window) -> list[str]:
    """Return the text of each draft after those above it."""
    if not step.is_tree:
        return window.ahead(step.drafted)
    paths: list[list[int]] = []
    for token, parent in zip(step.drafted, step.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return [window.ahead(path)[-1] for path in paths]


NO_TRIAL = (None,) * 4


def trials_by_node(step: Step) -> dict[int, tuple[float | None, ...]]:
    """Return, by node, the recorded chance of acceptance, coin number (None without a coin), p and q of each examined
    draft."""
    return {trial.node: trial[1:] for trial in step.trials}


def _downwards(step: Step, above: int = -1, margin: str = "") -> Iterator[tuple[int, str]]:
    """Yield the nodes of a tree below the node `above`, each followed by those below it, with the lines before its
    text.

    Siblings are joined by a line, each with a corner; an only child has a corner under its parent's text.
    """
    children = [node for node, parent in enumerate(step.parents) if parent == above]
    for node in children:
        if len(children) == 1:
            yield node, margin + "└ " * (above >= 0)
            yield from _downwards(step, node, margin + "  " * (above >= 0))
        else:
            last = node == children[-1]
            yield node, margin + ("└─ " if last else "├─ ")
            yield from _downwards(step, node, margin + ("   " if last else "│  "))


# By the phase of a round: the fields of a draft that are not known yet, and the values shown for them.
_UNKNOWN: dict[int, Json] = {
    DRAFTED: {"fate": "drafted", "coin": None, "p": None, "chance": None},
    SCORED: {"fate": "drafted", "coin": None},
    ACCEPTED: {},
}


class Trace(Drawn):
    """The rounds of an answer.

    `steps`: one row's rounds from its prefill on. `names`: the names of the drafter's sources. `words`: the rule in
    words, if they are not those of `RULES`. `exact`: the rule compared p and q at temperature 1 (no filter); otherwise
    the chance is approximate, unless the rounds recorded the probabilities compared.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        decode: Decode,
        look: Look,
        names: Sequence[str] = (),
        *,
        rule: LaneRule = "argmax",
        words: str = "",
        exact: bool = False,
    ) -> None:
        self.steps, self.look, self.names = list(steps), look, tuple(names)
        self.rule, self.exact, self._words = rule, exact, words or RULES[rule]
        self._decode = decode
        self._reviewed = any(step.inner for step in self.steps)
        # A draft's number, text, figures, fate and source take one row, if the screen is wide enough.
        self._has_chance = rule in ("match", "ratio")
        self._draws = rule in ("match", "coupled")  # a draft is accepted if the target drew it: there is no coin
        trials = [trial for step in self.steps for trial in step.trials]
        self._compared = any(trial.p is not None for trial in trials)
        coins = any(trial.number is not None for trial in trials) or (self._draws and self._compared)
        left = look.width - 17 - (2 + max(map(cell_len, names)) if len(names) > 1 else 0)
        self._room = (27 if self._has_chance else 14) + 11 * coins  # columns of the figures with their words
        self._spelled = left - self._room >= 12
        if not self._spelled:
            self._room = (18 if self._has_chance else 12) + (6 if self._draws else 5) * coins
        self._text = max(_MIN_TEXT, min(_MAX_TEXT, left - self._room))

    def rows(self) -> list[Row]:
        """Return all rows, however many: a trace is printed into the scrollback."""
        return [row for part in self.parts() for row in part.rows()]

    def parts(self) -> Iterator[Lines]:
        """Yield its head, then the rows of each round."""
        if not self.steps:
            yield Lines(flow([chunk("no rounds yet", "faint")], self.look), self.look)
            return
        yield Lines(self._head(), self.look)
        window = Window(self._decode)
        for number, step in enumerate(self.steps):
            yield Lines(self._round(number, read(step, window)), self.look)

    def picture(self, number: int) -> list[Row]:
        """Return round `number` (the prefill is round 0), with a bar of its times and the rule."""
        traced = self._traced(number)
        return [*self._round(number, traced), *self._times(traced.step), *self._head()]

    def _traced(self, number: int) -> TracedRound:
        window = Window(self._decode)
        return [read(step, window) for step in self.steps[: number + 1]][-1]

    def so_far(self, phase: int) -> list[Row]:
        """Return the last round as it stands after a phase."""
        traced = self._traced(len(self.steps) - 1)
        rows = [row for draft in traced.drafts for row in self._draft(draft._replace(**_UNKNOWN[phase]))]
        return rows + (self._from_target(traced.step, traced.token_text, True) if phase == ACCEPTED else [])

    def _times(self, step: Step) -> list[Row]:
        """Return a bar that is divided as the round's time was, and the times."""
        taken = [max(0.0, seconds) for seconds in (step.draft_s, step.verify_s, step.sample_s, step.overhead_s)]
        columns, sums = max(8, min(40, self.look.width // 3)), [0.0, *accumulate(taken)]
        ends = [round(columns * part / (sums[-1] or 1.0)) for part in sums]
        bar = [
            ((self.look.glyph("bar") if self.look.fancy else word[0]) * (end - start), role)
            for (word, role), start, end in zip(_TIMES, ends, ends[1:], strict=False)
        ]
        parts_of_time = [
            chunk(f"{word} {seconds * 1000:.1f}", role) for (word, role), seconds in zip(_TIMES, taken, strict=True)
        ]
        return flow([Chunk((("   ", "plain"), *bar)), *parts_of_time, chunk("ms", "faint", " ")], self.look, 3)

    def labels(self) -> list[str]:
        """Return in words the rule, which q and p are shown, and the drafter if there is one source."""
        exact = self.exact and not self._reviewed  # a lenient review changes q
        tried = all(step.trials for step in self.steps if step.drafted)
        words = (
            "the run's own may differ, chances are near",
            "those after the settings, which were compared, were not kept",
        )
        near = f"; {words[tried]}" * (self._has_chance and not exact and any(step.drafted for step in self.steps))
        compared = "p(x) after the settings, q(x) the drafter's own" if self._draws else "q(x), p(x) after the settings"
        if any(step.is_tree for step in self.steps) and not self._draws:
            compared += " and refused siblings"
        if any(step.discarded for step in self.steps):
            compared += "; (not examined: at temperature 1)"
        return [
            self._words,
            *(["reviews inside may be lenient: only the target's decides the text"] if self._reviewed else []),
            compared if self._compared else f"q(x), p(x) at temperature 1{near}",
            *([f"drafts by {self.names[0]}"] if len(self.names) == 1 else []),
        ]

    def _head(self) -> list[Row]:
        return [row for text in self.labels() for row in flow([chunk(text, "faint")], self.look)]

    def _round(self, number: int, traced: TracedRound) -> list[Row]:
        step = traced.step
        parts = [chunk("prefill" if number == 0 and not step.drafted else f"round {number}", "strong")]
        if step.drafted or number:
            accepted = f"accepted {len(step.path)}/{len(step.drafted)}" if step.drafted else "nothing drafted"
            words = [f"{self.look.glyph('gamma')} {step.gamma}", accepted, *(["chosen"] if step.chosen else [])]
            parts += [chunk(word, "faint") for word in words]
        if chances := [chance for call in step.calls for chance in call.confidence]:
            parts.append(chunk(f"confidence {' '.join(f'{chance:.2f}' for chance in chances)}", "faint"))
        return [
            *flow([*parts, chunk(f"{step.seconds * 1000:.1f} ms", "faint")], self.look, 2),
            *(row for review in step.inner for row in self._review(review, 1)),
            *(row for draft in traced.drafts for row in self._draft(draft)),
            *self._from_target(step, traced.token_text, bool(traced.drafts)),
        ]

    def _review(self, step: Step, level: int) -> list[Row]:
        """Return the rows of a review, a round inside the round: who reviewed whose drafts, and how many passed; then
        those of the reviews inside it."""
        reviewer, took = step.calls[-1].model if step.calls else "a reviewer", f"{step.seconds * 1000:.1f} ms"
        accepted, drafted = len(step.path), len(step.drafted)
        names = list(dict.fromkeys(self._name(source) for source in step.source)) or ["a drafter"]
        if not drafted:
            texts = [f"{reviewer} had nothing to review,", took]
        else:
            whose = enumerated((f"{name}'{'s' * (not name.endswith('s'))}" for name in names), "and")
            texts = [f"{reviewer} reviewed {whose} {drafted}:", f"accepted {accepted},", took]
        texts[0] = " " * _INDENT * level + texts[0]
        return [
            *flow([chunk(text, "faint", " ") for text in texts], self.look, _INDENT * (level + 1)),
            *(row for review in step.inner for row in self._review(review, level + 1)),
        ]

    def _from_target(self, step: Step, text: str, drafted: bool) -> list[Row]:
        if step.token is None:
            return flow([chunk("    ended by an accepted stop token", "faint")], self.look, 4)
        kind = "correction" if step.rejected else "bonus" if drafted else "own token"
        token = chunk(quoted(text, self.look, _MAX_TEXT), "bonus" if kind == "bonus" else "target")
        target = f"from the target ({kind}), top-2 gap {step.top2_gap:.3f}" if step.top2_gap is not None else ""
        return flow([chunk("  "), token, chunk(target or "from the server", "faint")], self.look, 4)

    def _draft(self, draft: Drafted) -> list[Row]:
        branch = draft.branch.translate(_ASCII_LINES) if self.look.ascii else draft.branch
        branch = branch[-(self.look.width // 4) :]
        columns = max(_MIN_TEXT, self._text - len(branch))
        text = quoted(draft.text, self.look, columns)
        name = "" if draft.source is None or len(self.names) < 2 else self._name(draft.source)
        chunks = [
            chunk(f"{draft.number:>2}"),
            Chunk(((branch, "faint"), (text, self._role(draft.fate, draft.source)))),
            chunk(" " * (columns - cell_len(text)), "plain", ""),
            chunk(self._figures(draft)),
            chunk(draft.fate, {"rejected": "strong", "drafted": "faint"}.get(draft.fate, draft.fate)),
            chunk(" " * (9 - len(draft.fate)) if name else "", "plain", ""),
            chunk(name, "faint"),
        ]
        return flow([item for item in chunks if item.width], self.look, 4)

    def _role(self, fate: str, source: int | None) -> str:
        """Return the style of a draft's text; an accepted draft has its source's tint, if there are several sources."""
        if fate == "drafted":
            return "plain"
        several = fate == "accepted" and len(self.names) > 1
        return tint(source, self._name(source)) if several and source is not None else fate

    def _name(self, source: int) -> str:
        return self.names[source] if 0 <= source < len(self.names) else str(source)

    def _figures(self, draft: Drafted) -> str:
        both, examined = draft.compared or (draft.q, draft.p), draft.compared or not self._compared
        if both[0] is not None and draft.fate == "drafted" and draft.p is None:
            return (f"q {share(both[0]):>4}" if self._spelled else f"q{share(both[0])}").ljust(self._room)
        if both[0] is None or both[1] is None:
            return "not examined".ljust(self._room)
        q, p, likely = share(both[0]), share(both[1]), self._chance(draft) if examined else None
        chance = "" if likely is None else share(likely)
        coin = "" if draft.coin is None else share(draft.coin)
        decided = draft.fate != "drafted"
        names = ("q {:>4}", "p {:>4}", "chance {:>4}", "coin {:>4}") if self._spelled else ("q{}", "p{}", "ch{}", "u{}")
        parts = [name.format(value) for name, value in zip(names, (q, p, chance, coin), strict=True) if value]
        if self._draws and draft.compared and decided:
            parts.append("drawn" if draft.fate == "accepted" else "not drawn" if self._spelled else "other")
        figures = ("  " if self._spelled else " ").join(parts)
        if decided and not examined:
            figures = f"({figures})"
        return figures.ljust(self._room)

    def _chance(self, draft: Drafted) -> float | None:
        if draft.chance is not None:
            return draft.chance if self._has_chance else None
        return chance("match" if draft.chosen and self._has_chance else self.rule, draft.q or 0.0, draft.p or 0.0)


class RoundPictures:
    """A viewer's content: round `number` (the prefill is round 0) of the trace that `make` draws, which keys scroll if
    it is higher than the screen.
    """

    help = "n next round  p previous  up/down scroll  q leave"

    def __init__(self, make: Callable[[Look], Trace], number: int) -> None:
        self.make, self.number = make, number
        self._top, self._page = 0, 1  # the first row that is shown, and how many are
        self.last = len(make(Look()).steps) - 1
        if not 0 <= number <= self.last:
            raise UserError(f"there is no round {number}: the answer has rounds 0 to {self.last}")

    def rows(self, look: Look) -> list[Row]:
        """Return as much of the picture as fits; if rows are left out, the last row says how many."""
        rows, height = self.picture(look), look.height
        if height is None or len(rows) <= height:
            self._top = 0
            return rows
        self._page = max(1, height - 1)
        self._top = max(0, min(self._top, len(rows) - self._page))
        end = self._top + self._page
        position = chunk(f"{plural(self._top, 'row')} above, {len(rows) - end} below", "faint")
        return [*rows[self._top : end], *flow([position], look)[:1]]

    def picture(self, look: Look) -> list[Row]:
        """Return the whole picture."""
        return self.make(look.sized()).picture(self.number)

    def to(self, number: int) -> None:
        """Show the round of this number, or the nearest one if there is none."""
        self.number, self._top = max(0, min(self.last, number)), 0

    def scroll(self, rows: int) -> None:
        """Move by a number of rows."""
        self._top = max(0, self._top + rows)

    @property
    def keys(self) -> dict[str, Action]:
        forth, back = lambda: self.to(self.number + 1), lambda: self.to(self.number - 1)
        return {
            **{"n": forth, "right": forth, "p": back, "left": back},
            "home": lambda: self.to(0),
            "end": lambda: self.to(self.last),
            "up": lambda: self.scroll(-1),
            "down": lambda: self.scroll(1),
            "pageup": lambda: self.scroll(-self._page),
            "pagedown": lambda: self.scroll(self._page),
        }
