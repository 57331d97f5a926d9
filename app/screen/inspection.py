"""An answer token by token: who proposed each token, which others target and drafter considered, what decided, and what
would decide under other settings.

:class:`TokenReader` makes tokens with their texts from rounds; :class:`Inspection` is content of the viewer
(app/screen/terminal.py: view) that walks over them. Figures that were not recorded are left out, not estimated. Knows
no models: a token that the user forces is only returned.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from rich.cells import cell_len

from app.lanes.answers import LaneRule, other_processors
from app.screen.palette import Look
from app.screen.rows import Piece, Row, beside, chunk, fit, flow, one_line, plural, precise, quoted, row_of, share, wrap
from app.screen.terminal import Action
from app.screen.trace import NO_TRIAL, trials_by_node
from app.screen.what_if import Bounds, RankedToken, drafter_rest_bounds, overlap, shaped, target_rest_bounds
from app.settings.table import Settings
from sampling.events import DELTA, EPSILON, Filters, Step
from utils.growing_text import Decode, Window

SIDE_FROM = 100  # columns from which the panel stands beside the text
_PANEL = 60  # columns of such a panel
_LINES = 2  # lines of the text that stay above a panel
_TEXT = 16  # columns of a token's text in the table, at most
LISTED = 5  # likeliest tokens of target and drafter that are listed

# The keys of a what-if, and the values that each goes through.
SUPPOSE = {"t": "temperature", "p": "top_p", "k": "top_k", "m": "min_p"}
LADDERS: Mapping[str, Sequence[float]] = {
    "temperature": (0, 0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2),
    "top_p": (1, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2),
    "top_k": (0, 1, 2, 3, 5, 10, 20, 50),
    "min_p": (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
}

# The target's token is a correction after a rejected draft, a bonus after accepted ones, an own token without drafts.
Origin = Literal["accepted", "correction", "bonus", "own token", "forced", "a server's"]


class Candidates(NamedTuple):
    """A token considered at a position, with the target's and the drafter's figures, None where not recorded: `p`, `q`
    at temperature 1, `processed`, `q_processed` after the settings."""

    token: int
    text: str
    p: float | None = None
    processed: float | None = None
    rank: int | None = None
    noise: float = 0.0
    q: float | None = None
    q_rank: int | None = None
    by: str = ""
    fate: str = ""  # said, rejected, or replaced by a forced token; "": neither
    q_processed: float | None = None


class Refused(NamedTuple):
    """A draft that was rejected at a position; where known with its chance, its coin's number, and p and q after the
    settings."""

    token: int
    text: str
    chance: float | None
    number: float | None
    p: float | None = None
    q: float | None = None


@dataclass(frozen=True, slots=True)
class SaidToken:
    """A token of an answer. `text`: what it adds to the answer; `shown`: its own text; `round` 0 is the prefill's."""

    token: int
    text: str
    shown: str
    round: int
    kind: Origin
    rule: LaneRule = "argmax"
    by: str = ""
    chance: float | None = None  # of an accepted draft
    number: float | None = None  # of its coin, uniform in (0, 1)
    p: float | None = None  # the token's, after the settings, as is q
    q: float | None = None
    choices: tuple[Candidates, ...] = ()
    refused: tuple[Refused, ...] = ()
    discarded: int = 0  # drafts of the round that were not examined, if this token ended it
    entropy: float | None = None
    rest: tuple[float, ...] = ()  # as `Position.rest`


class TokenReader:
    """Reads the rounds of a row one after the other; `names` are those of `Step.source`."""

    def __init__(self, decode: Decode, names: Sequence[str], rule: LaneRule, context: Sequence[int] = ()) -> None:
        self._window, self._names, self._rule = Window(decode, context), names, rule
        self._round = -1

    def read(self, step: Step) -> list[SaidToken]:
        """Return the tokens of the next round."""
        self._round += 1
        chances, depths = trials_by_node(step), step.depths
        tokens: list[SaidToken] = []
        for index, token in enumerate(step.emitted):
            node = step.path[index] if index < len(step.path) else None
            refused = [at for at in step.rejected if depths[at] == index]
            chance, number, p, q = NO_TRIAL if node is None else chances.get(node, NO_TRIAL)
            position = step.positions[index] if index < len(step.positions) else None
            tokens.append(
                SaidToken(
                    token,
                    shown=self._text(token),
                    round=self._round,
                    kind=_kind(step, node),
                    rule="match" if step.chosen and self._rule == "ratio" else self._rule,
                    by="" if node is None else self._name(step.source[node] if node < len(step.source) else 0),
                    chance=chance,
                    number=number,
                    p=p,
                    q=q,
                    choices=self._choices(step, index, node, refused),
                    refused=tuple(
                        Refused(step.drafted[at], self._text(step.drafted[at]), *chances.get(at, NO_TRIAL))
                        for at in refused
                    ),
                    discarded=len(step.discarded) if node is None else 0,
                    entropy=None if position is None else position.entropy,
                    rest=() if position is None else position.rest,
                    text=self._window.push(token),
                )
            )
        return tokens

    def _choices(self, step: Step, index: int, node: int | None, refused: Sequence[int]) -> tuple[Candidates, ...]:
        """Return the considered tokens: the target's likeliest first, then those that only the drafter named."""
        said, rejected = step.emitted[index], {step.drafted[at] for at in refused}
        choices, drafter = dict[int, Candidates](), {trial.node: trial.q for trial in step.trials}
        for at, p, q in zip((*step.path, *step.rejected), step.target_p, step.draft_p, strict=False):
            if at == node or at in refused:
                choices[step.drafted[at]] = Candidates(step.drafted[at], "", p=p, q=q, q_processed=drafter.get(at))
        for position in step.positions[index : index + 1]:
            named = [(likely.token, likely._asdict()) for likely in position.target]
            named += [
                (proposal.token, {"q": proposal.q, "q_rank": proposal.rank, "by": self._name(proposal.source)})
                for proposal in position.drafter
            ]
            for token, known in named:
                choices[token] = choices.get(token, Candidates(token, ""))._replace(**known)
        own = step.target_p[0] if step.top2_gap is None and step.target_p else None  # of a server's piece
        choices.setdefault(said, Candidates(said, "", processed=own))
        return tuple(
            choice._replace(
                text=self._text(choice.token),
                fate="said" if choice.token == said else "rejected" if choice.token in rejected else "",
            )
            for choice in sorted(choices.values(), key=_order)
        )

    def _text(self, token: int) -> str:
        return self._window.ahead([token])[0]

    def _name(self, source: int) -> str:
        return self._names[source] if 0 <= source < len(self._names) else "drafter"


def _kind(step: Step, node: int | None) -> Origin:
    if node is not None:
        return "accepted"
    if step.top2_gap is None:
        return "a server's"
    return "correction" if step.rejected else "bonus" if step.drafted else "own token"


def _order(choice: Candidates) -> tuple[float, float]:
    return (choice.rank or math.inf, choice.q_rank or math.inf)


def forced_in(replaced: SaidToken, token: int) -> SaidToken:
    """Return `replaced` with the token that the user forced in its place."""
    fates = {replaced.token: "replaced", token: "said"}
    choices = tuple(choice._replace(fate=fates.get(choice.token, choice.fate)) for choice in replaced.choices)
    text = next((choice.text for choice in choices if choice.token == token), "")
    return replace(
        replaced, token=token, text=text, shown=text, kind="forced", choices=choices, by="", refused=(), discarded=0
    )


class Force(NamedTuple):
    """A token that the user wants in the place of the answer's token number `position`, from 0."""

    position: int
    token: int


def forced_hint(text: str, number: int, look: Look) -> str:
    """The line above an answer whose first `number` tokens, with this text, end with a forced one."""
    return f"token {number} is forced, the answer goes on after: {one_line(text, look)[-40:]}"


class Inspection:
    """A viewer's content: the text with a cursor on one token, and a panel about it.

    `before`: text that the cursor cannot reach. `forces`: Enter on an alternative ends the viewer with a
    :class:`Force`. `settings`: the answer's; `shape`: those of a what-if for this token, None without one.
    """

    def __init__(
        self,
        tokens: Sequence[SaidToken],
        index: int = 0,
        *,
        before: str = "",
        forces: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self.tokens, self.before, self.forces, self.settings = tokens, before, forces, settings or Settings()
        self.index = max(0, min(index, len(tokens) - 1))
        self.shape: Filters | None = None
        self.choice = self._said()
        self.help = (
            f"left/right token  n/b round  up/down alternative  {'Enter forces it  ' * forces}t/p/k/m what if  q leave"
        )

    @property
    def token(self) -> SaidToken:
        """The token under the cursor."""
        return self.tokens[self.index]

    def _said(self) -> int:
        """Return the index of the answer's own token among the alternatives shown."""
        return next((at for at, choice in enumerate(self.shown) if choice.fate == "said"), 0)

    @property
    def shown(self) -> list[Candidates]:
        """The listed alternatives: the five likeliest of target and drafter, and examined ones; in a what-if all."""
        return [choice for choice in self.token.choices if self.shape or choice.fate or min(_order(choice)) <= LISTED]

    # -- keys ---------------------------------------------------------------------------------

    def to(self, index: int) -> None:
        """Go to the token of this index, or to the nearest one if there is none."""
        self.index, self.shape = max(0, min(len(self.tokens) - 1, index)), None
        self.choice = self._said()

    def turn(self, by: int) -> None:
        """Go to the first token of a later or earlier round."""
        rounds = sorted({token.round for token in self.tokens})
        at = max(0, min(len(rounds) - 1, rounds.index(self.token.round) + by))
        self.to(next(index for index, token in enumerate(self.tokens) if token.round == rounds[at]))

    def choose(self, by: int) -> None:
        """Go to another alternative."""
        self.choice = max(0, min(len(self.shown) - 1, self.choice + by))

    def suppose(self, name: str, by: int) -> None:
        """Change a setting of the what-if to the next value of its ladder, or for `by` -1 to the one before."""
        given = self.settings
        shape = self.shape or Filters(given.temperature, given.top_k, given.top_p, given.min_p)
        ladder, value = LADDERS[name], getattr(shape, name)
        nearest = min(range(len(ladder)), key=lambda at: abs(ladder[at] - value))
        index = nearest + by if ladder[nearest] == value else nearest
        self.shape = Filters(**{**shape._asdict(), name: ladder[index % len(ladder)]})
        self.choice = self._said()

    def force(self) -> Force | None:
        """Return the token that Enter forces; None if it is the answer's own token, or if Enter forces none."""
        chosen = self.shown[self.choice]
        return Force(self.index, chosen.token) if self.forces and chosen.fate != "said" else None

    @property
    def keys(self) -> dict[str, Action]:
        return {
            "left": lambda: self.to(self.index - 1),
            "right": lambda: self.to(self.index + 1),
            "home": lambda: self.to(0),
            "end": lambda: self.to(len(self.tokens) - 1),
            "n": lambda: self.turn(1),
            "b": lambda: self.turn(-1),
            **{key: partial(self.suppose, name, 1) for key, name in SUPPOSE.items()},
            **{key.upper(): partial(self.suppose, name, -1) for key, name in SUPPOSE.items()},
            "r": lambda: self.to(self.index),  # without the what-if
            "up": lambda: self.choose(-1),
            "down": lambda: self.choose(1),
            "enter": self.force,
        }

    def listed(self, look: Look) -> list[Row]:
        """Return a row for each token, for output that no keys can move through."""
        titles = f"{'':>4} {'':<{_TEXT}}     p   set rank     q rank  round"
        rows = [row_of([(fit(titles, look.width, look), "faint")], look)]
        for number, token in enumerate(self.tokens, start=1):
            said = next((choice for choice in token.choices if choice.fate == "said"), Candidates(token.token, ""))
            text = quoted(token.shown, look, _TEXT)
            figures = f"{_figure(said.p)} {_figure(said.processed)} {_rank(said.rank)} {_figure(said.q)}"
            words = [
                chunk(f"{number:>4}"),
                chunk(text, _ROLES[token.kind], " "),
                chunk(" " * (_TEXT - cell_len(text)), "plain", ""),
                chunk(f"{figures} {_rank(said.q_rank)} {token.round:>6}", "plain", " "),
                chunk(f"accepted ({token.by})" if token.by else token.kind),
            ]
            rows += flow(words, look, 5)
        return rows

    # -- drawing ------------------------------------------------------------------------------

    def rows(self, look: Look) -> list[Row]:
        """Return text and panel: side by side from 100 columns on, else the panel below."""
        if look.width < SIDE_FROM:
            panel = self.panel(look.sized(height=None if look.height is None else look.height - _LINES))
            room = None if look.height is None else max(1, look.height - len(panel))
            return [*self.text(look.sized(height=room)), *panel][: look.height]
        panel = self.panel(look.sized(width=_PANEL, height=look.height))[: look.height]
        width = look.width - _PANEL - 2
        return beside(self.text(look.sized(width=width, height=look.height or max(len(panel), 1))), panel, width + 2)

    def text(self, look: Look) -> list[Row]:
        """Return the lines around the cursor, whose token is reversed, or without colour between >> and <<."""
        pieces: list[Piece] = [(self.before, "faint")] if self.before else []
        for index, token in enumerate(self.tokens):
            if index != self.index:
                pieces.append((token.text, _ROLES[token.kind]))
                continue
            cursor, end = token.text or token.shown, ""
            if not cursor.strip() and "\n" in cursor:
                cursor, end = look.glyph("newline"), "\n"
            pieces += [(cursor if look.color else f">>{cursor}<<", "here"), (end, "plain")]
        lines = wrap(pieces, look.width, look.ascii)
        height = look.height or len(lines)
        at = next((at for at, line in enumerate(lines) if any(role == "here" for _, role in line)), 0)
        first = max(0, min(at - height // 2, len(lines) - height))
        return [row_of(line, look) for line in lines[first : first + height]]

    def panel(self, look: Look) -> list[Row]:
        """Return all that is known of the token under the cursor."""
        token = self.token
        head = [
            chunk(f"token {self.index + 1}/{len(self.tokens)}", "strong"),
            chunk(f"round {token.round}", "faint"),
            chunk(quoted(token.shown, look, 24), _ROLES[token.kind]),
            chunk(f"accepted, proposed by {token.by}" if token.kind == "accepted" else token.kind, "strong"),
        ]
        head += [] if token.entropy is None else [chunk(f"entropy {token.entropy:.2f} bits", "faint")]
        supposed = None if self.shape is None else Supposed(token, self.shape, self.settings)
        lines = decided(token, look) if supposed is None else supposed.lines(look)
        rows = [*flow(head, look, 2), *(row for line in lines for row in flow([chunk(line)], look, 2))]
        titles, *table = self._table(look, supposed.p if supposed else {})
        most = len(table) if look.height is None else max(1, look.height - len(rows) - 1)
        first = max(0, min(self.choice - most // 2, len(table) - most))
        return [*rows, titles, *table[first : first + most]]

    def _table(self, look: Look, supposed: Mapping[int, Bounds]) -> list[Row]:
        """Return the titles, and a row for each alternative."""
        if self.token.kind == "a server's":
            return flow([chunk("a piece of text as it came; other tokens are not known", "faint")], look)
        if not any(choice.rank or choice.q_rank for choice in self.token.choices):
            return flow([chunk("alternatives were not kept (files keep them with --log-top 5)", "faint")], look)
        kept = any(choice.q_processed is not None for choice in self.shown)
        columns = max(8, min(_TEXT, look.width - 49 - 6 * kept))
        titles = f"  {'':<{columns}}     p   {' if' if supposed else 'set'} rank     q{'   set' * kept} rank  by"
        rows = [row_of([(fit(titles, look.width, look), "faint")], look)]
        for at, choice in enumerate(self.shown):
            text, bounds = quoted(choice.text, look, columns), supposed.get(choice.token)
            second, cut = choice.processed if bounds is None else bounds[1], bounds is not None and not bounds[1]
            figures = [_figure(choice.p), _figure(second), _rank(choice.rank), _figure(choice.q)]
            figures += [_figure(choice.q_processed)] * kept + [_rank(choice.q_rank), f" {choice.by}"]
            chosen = at == self.choice
            role = "cut" if cut else {"said": "good", "rejected": "rejected"}.get(choice.fate, "plain")
            fate = choice.fate + (" cut" if cut else " or cut" if bounds and not bounds[0] else "")
            pieces = [
                (f"{look.glyph('prompt')} " if chosen else "  ", "strong"),
                (text, role),
                (" " * (columns - cell_len(text)), "plain"),
                (" ".join(["", *figures]), "strong" if chosen else "plain"),
                (f" {fate}" if fate else "", "faint"),
            ]
            rows.append(row_of(wrap(pieces, look.width, look.ascii)[0], look))
        return rows


_ROLES: dict[Origin, str] = {
    "accepted": "accepted",
    "correction": "target",
    "bonus": "bonus",
    "own token": "target",
    "forced": "forced",
    "a server's": "target",
}


def _figure(value: float | None) -> str:
    return "    -" if value is None else f"{precise(value):>5}"


def _rank(rank: int | None) -> str:
    return f"{rank or '-':>4}" if (rank or 0) < 10_000 else f"{rank // 1000:>3}k"  # type: ignore[operator]


def decided(token: SaidToken, look: Look) -> list[str]:
    """Return in words what decided a token, and the drafts that were rejected at its position."""
    lines = [
        f"{quoted(draft.text, look, 24)}: {_tossed(token, draft, '>=')}: rejected"
        for draft in token.refused
        if draft.number is not None
    ]
    if token.rule == "typical":
        lines = _likely_enough(token, look)
    elif chosen := [quoted(draft.text, look, 24) for draft in token.refused if draft.number is None]:
        lines.append(
            f"{', '.join(chosen)} {'was' if len(chosen) == 1 else 'were'} drafted, "
            f"the target chose {quoted(token.shown, look, 24)}: rejected"
        )
    as_drafted = ", as drafted" if token.kind == "accepted" else ""
    if token.kind == "forced":
        return [*lines, "forced: neither target nor drafter was asked"]
    if token.kind == "a server's":
        return lines
    if token.kind == "accepted" and token.number is not None and token.chance is not None:
        lines.append(f"{_tossed(token, token, '<')}: accepted")
    elif token.kind == "correction" and token.rule == "ratio":
        lines.append("the token was then drawn from what p has more than q")
    elif token.rule == "argmax":
        changed = any(choice.fate == "said" and (choice.rank or 1) > 1 for choice in token.choices)
        whose = "likeliest token after the settings" if changed else "target's likeliest token"
        lines.append(f"greedy: the {whose}{as_drafted}")
    elif token.rule != "typical" or token.kind != "accepted":
        drawn = _drawn(token, look) or ("the target's own" if token.rule == "typical" else "drawn by the target")
        lines.append(drawn + as_drafted)
    if token.kind == "bonus":
        lines.append("every draft of its path was accepted: this token came with the same pass")
    if token.discarded and token.kind == "bonus":
        lines.append(f"{plural(token.discarded, 'draft')} on other branches left aside")
    elif token.discarded:
        lines.append(f"{plural(token.discarded, 'further draft')} discarded, not examined")
    return lines


def _likely_enough(token: SaidToken, look: Look) -> list[str]:
    """Return a line for each draft that a lossy rule examined at the position, with the threshold for its p."""
    p, known = {choice.token: choice.p for choice in token.choices}, token.entropy  # in bits
    value = "" if known is None else f" = {precise(min(EPSILON, DELTA * 2**-known))}"
    threshold = f"min({share(EPSILON)}, {share(DELTA)} exp(-H)){value}"
    fates = [
        *((each.token, each.text, "<=", "rejected") for each in token.refused),
        *([(token.token, token.shown, ">", "accepted")] * (token.kind == "accepted")),
    ]
    return [
        f"lossy: {quoted(text, look, 24)} p {_figure(p[draft]).strip()} {sign} {threshold}: {fate}"
        for draft, text, sign, fate in fates
    ]


def _tossed(token: SaidToken, draft: SaidToken | Refused, sign: str) -> str:
    """Return a draft's coin and chance of acceptance, with as many digits as show which is larger."""
    coin, chance, p, q = draft.number or 0.0, draft.chance or 0.0, draft.p, draft.q
    more = next((more for more in range(8) if precise(coin, more) != precise(chance, more)), 8)
    compared = f"coin {precise(coin, more)} {sign} chance {precise(chance, more)}"
    set_p = next((choice.processed for choice in token.choices if choice.token == draft.token), None)
    if token.rule != "ratio" or p is None or q is None or q < 1e-12:
        lost = f"{'p and q' if set_p is None else 'q'} after the settings {'were' if set_p is None else 'was'} not kept"
        return f"{compared} ({lost})" if token.rule == "ratio" else compared
    after = f"both after the settings{'' if math.isclose(set_p or p, p, rel_tol=0.01) else ' and refused siblings'}"
    if not math.isclose(min(1.0, p / q), chance, rel_tol=1e-3):
        return f"{compared} (of a block; p {precise(p)}, q {precise(q)}, {after})"
    figures = ([precise(each, digits) for each in (p, q)] for digits in range(8))
    right = (
        pair for pair in figures if precise(min(1.0, float(pair[0]) / float(pair[1])), more) == precise(chance, more)
    )
    quotient = "p {} / q {}".format(*next(right, (p, q)))
    return f"{compared} = {f'min(1, {quotient})' if p > q else quotient}, {after}"


def fixed_by(settings: Settings, rule: LaneRule) -> str:
    """Return why one token under this rule cannot be tried with other settings; "" where it can."""
    fixed = {
        "a lossy rule asks p at temperature 1, whatever the settings": rule == "typical",
        "the coins of a block depend on every draft in it (--verify block)": rule == "ratio"
        and settings.verify == "block",
        "biases, penalties, typical-p, grammars and bans of repeats cannot be taken back": other_processors(
            settings, "temperature", "top_k", "top_p", "min_p", "penalty_window"
        ),
    }
    return next((f"what if: {why}" for why, holds in fixed.items() if holds), "")


class Supposed:
    """A token in a what-if: the bounds of `p` by token, and of `q` for drawn drafts; `problem`: why there are none."""

    def __init__(self, token: SaidToken, shape: Filters, settings: Settings) -> None:
        self.token, self.shape, self.p, self.q = token, shape, dict[int, Bounds](), dict[int, Bounds]()
        unkept = "what if: the 20 likeliest tokens were not kept (--log-top 20 keeps them)"
        self.problem = fixed_by(settings, token.rule) or unkept * (not token.rest)
        if self.problem:
            return
        beta = 1 / (shape.temperature or 1)
        ranked = (
            RankedToken(each.token, each.p, each.rank) for each in token.choices if each.p is not None and each.rank
        )
        self.p = shaped(sorted(ranked, key=lambda each: each.rank), target_rest_bounds(token.rest, beta), shape)
        ranked = (RankedToken(each.token, each.q, each.q_rank) for each in token.choices if each.q and each.q_rank)
        if token.rule == "ratio" and (drafted := sorted(ranked, key=lambda each: each.rank)):
            count = math.exp(token.rest[0]) + len(token.choices)
            self.q = shaped(drafted, drafter_rest_bounds(drafted, count, beta), shape)

    def lines(self, look: Look) -> list[str]:
        """Return the settings of the what-if, and whether they would accept the drafts."""
        if self.problem:
            return [self.problem]
        shape, fates = self.shape, ("rejected", "said") if self.token.kind == "accepted" else ("rejected",)
        numbers = {refused.token: refused.number for refused in self.token.refused}
        numbers[self.token.token] = self.token.number
        lines = [
            f"what if T {shape.temperature:g}, top-p {shape.top_p:g}, top-k {shape.top_k or '0 (all)'}, "
            f"min-p {shape.min_p:g}:",
            *(
                f"{quoted(choice.text, look, 24)} {self.fate(choice.token, numbers.get(choice.token))}"
                for choice in self.token.choices
                if choice.fate in fates
            ),
        ]
        if self.q and shape.temperature:
            low, high = overlap(self.p, self.q)
            bar = look.glyph("bar") * round(20 * high) if look.fancy else ""
            chance = f"accepted with chance {_span((low, high))}, the sum of min(p, q)"
            chance += " (bounds: only the 20 likeliest tokens are kept)" * (" to " in chance)
            lines.append(f"a draft drawn here is {chance} {bar}".rstrip())
        return lines

    def fate(self, token: int, number: float | None) -> str:
        """Return in words whether a draft would be accepted; `number`: that of its coin."""
        low, high = self.p.get(token, (0.0, 1.0))
        if not self.shape.temperature:
            return "would be accepted: it is the likeliest" if low else "would be rejected: it is not the likeliest"
        if token not in self.q:
            return f"would be accepted with chance {_span((low, high))}"
        less, more = self.q[token]
        low, high = min(1.0, low / more) if more else 1.0, min(1.0, high / less) if less else 1.0
        fate = "open" if number is None or low <= number < high else "accepted" if number < low else "rejected"
        return f"would have chance {_span((low, high))}{'' if number is None else f', u {precise(number)}'}: {fate}"


def _span(bounds: Bounds) -> str:
    low, high = map(precise, bounds)
    return low if low == high else f"{low} to {high}"


def _drawn(token: SaidToken, look: Look) -> str:
    """Return the two largest log p + noise, the first of which is drawn (Gumbel-max); "" if not recorded or drawn."""
    scores = sorted(
        (
            (math.log(choice.processed) + choice.noise, choice.text)
            for choice in token.choices
            if choice.processed and choice.noise
        ),
        reverse=True,
    )
    shown = [f"{quoted(text, look, 16)} {score:.2f}" for score, text in scores[:2]]
    return f"drawn: largest log p + random noise: {', next '.join(shown)}" if shown else ""
