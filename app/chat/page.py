"""A page to share: answers with their rounds and tokens in one HTML file that loads no other.

The texts and figures are plain HTML, readable without scripts. Rounds and tokens are JSON in the page
(docs/replay-and-simulate.md), which the script of the template (page.html beside this file) plays and explains. Markup
in a text is shown, not obeyed; only the template's own script may run. Knows no models, no tokenizer and no torch.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from app.lanes.answers import RULES, comparisons_of, rule_of, rule_text, shown_settings
from app.screen.inspection import LISTED, Candidates, Refused, SaidToken, decided, fixed_by
from app.screen.live import Track, explained_track, phases, rounds_of, tokens_of
from app.screen.palette import TINTS, Look
from app.screen.panes import details, note, stats_lines, title_of
from app.screen.rows import Row, one_line
from app.screen.samples import Branch, probability
from app.screen.trace import TracedRound, read
from app.screen.view import heading
from app.screen.why import Why
from app.settings.table import Settings
from sampling.events import GRAMMAR, INVERSE_TEMPERATURES
from utils.growing_text import Window
from utils.objects import Json
from utils.visible import visible

_LOOK = Look(width=10_000)
_NO_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
PageCell = str | float | None
DRAFTS = (
    *("node", "parent", "depth", "branch", "text", "source", "fate", "q", "p", "chance", "u"),
    *("q_processed", "p_processed"),
)
CHOICES = (
    "text",
    "token",
    "p",
    "processed",
    "rank",
    "q",
    "q_rank",
    "by",
    "fate",
    "q_processed",
)  # "text" is an index into the page's `texts`


class PageAnswer(NamedTuple):
    """An answer, or a continuation of one (without `question`); no `tracks` if only its text is known."""

    question: str
    text: str
    models: Mapping[str, str] = {}
    settings: Settings = Settings()
    tracks: Sequence[Track] = ()
    samples: Sequence[Branch] = ()  # other answers to the question, as a tree


def page(answers: Iterable[PageAnswer], title: str = "Conversation") -> str:
    """Return the page of these answers."""
    every, texts = list(answers), dict[str, int]()
    data = {
        "version": 1,
        "columns": {"drafts": DRAFTS, "choices": CHOICES},
        "inverse_temperatures": INVERSE_TEMPERATURES,
        "answers": [_data(answer, texts) for answer in every],
        "texts": list(texts),  # `_data` has filled it
    }
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    parts = {
        "policy": f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        "title": _html(title),
        "body": "\n".join(_article(number, answer) for number, answer in enumerate(every, start=1)),
        "data": json.dumps(_all_shown(data), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _shown(text: str) -> str:
    return _NO_TEXT.sub("\ufffd", visible(text))


def _all_shown(data: Any) -> Any:
    """Return the data with control characters in its texts made visible."""
    if isinstance(data, dict):
        return {name: _all_shown(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_all_shown(value) for value in data]
    return _shown(data) if isinstance(data, str) else data


def _html(text: str) -> str:
    return escape(_shown(text))


# -- the text without scripts --------------------------------------------------------------------


def _article(number: int, answer: PageAnswer) -> str:
    models, notes = "", ["the drafts and figures of this answer are not there"]
    lanes = f'<section class="lane"><p class="text">{_html(answer.text)}</p></section>'
    if answer.tracks:
        models = _line(heading(answer.models, answer.settings, _LOOK).rows())
        lanes = "\n".join(_section(track, answer.question) for track in answer.tracks)
        notes = [
            *(each.text for each in comparisons_of([track.answer() for track in answer.tracks])),
            note(answer.tracks[-1].pane(), can_continue=False),
            f"Why (commands are for the console): {Why(answer.tracks)}",
        ]
    section = '<section class="branches"><h3>Samples, with their number and the probability of all tokens so far</h3>'
    samples = f"{section}{_branches(answer.samples)}</section>" if answer.samples else ""
    lines = "".join(f'<p class="compared">{_html(line)}</p>\n' for line in notes if line)
    return (
        f'<article aria-labelledby="q{number}">\n'
        f'<h2 id="q{number}">{number} · {_html(answer.question or "(continued)")}</h2>\n'
        f'<p class="faint models">{_html(models)}</p>\n<div class="lanes">\n{lanes}\n</div>\n{lines}{samples}</article>'
    )


def _branches(branches: Sequence[Branch]) -> str:
    """Return branches as an HTML list; a branch with children can be folded."""
    parts = []
    for branch in branches:
        text = f'<b>{branch.count}</b> <span class="faint">{probability(branch.p)}</span> {_html(branch.text)}'
        inner = f"<details open><summary>{text}</summary>{_branches(branch.children)}</details>"
        parts.append(f"<li>{inner if branch.children else text}</li>")
    return f"<ul>{''.join(parts)}</ul>"


def _section(track: Track, question: str) -> str:
    """Return a lane as HTML: its title, its text with rejected drafts, its figures, and what the colours mean."""
    pane, names = track.pane(), track.lane.terms.sources
    more = "".join(each.before + text for each in details(pane, _LOOK) for text, _ in each.pieces)
    figures = _line(stats_lines([pane], _LOOK).rows()) + more
    counts = zip(names, track.meter.stats.sources, strict=False)
    kinds = [
        *((_tint(names, name), f"accepted, by {name}") for name, (_, kept) in counts if kept),
        *(("rejected", "rejected draft"), ("target", "from the target"), ("bonus", "bonus after accepted drafts")),
    ]
    legend = ", ".join(f'<span class="{kind}">{_html(words)}</span>' for kind, words in kinds if pane.drafting)
    before = _html(track.decode(list(track.before))) if track.before and question else ""
    return (
        f'<section class="lane"><h3>{_html(title_of(track.lane))}</h3>\n'
        f'<p class="text"><span class="faint">{before}</span>{"".join(_spans(track))}</p>\n'
        f'<p class="figures">{_html(figures)}</p>\n<p class="faint legend">{legend}</p></section>'
    )


def _line(rows: Sequence[Row]) -> str:
    return " ".join("".join(part.text for part in row) for row in rows)


def _tint(names: Sequence[str], name: str) -> str:
    number = names.index(name) % len(TINTS) if name in names else 0
    return f"accepted s{'g' if name == GRAMMAR else number}"


def _spans(track: Track) -> Iterator[str]:
    """Yield the text token by token (data-t: its number, data-r: its round), with each round's rejected draft before
    the target's token."""
    own = {"bonus": "bonus", "correction": "target", "own token": "target" if track.lane.terms.drafts else ""}
    said = ""
    for number, token in enumerate(tokens_of(track)):
        marks = f'data-r="{token.round}"' + (" data-own" if token.kind != "accepted" else "")
        if token.kind != "accepted" and token.refused:
            yield f'<del class="rejected" data-r="{token.round}">{_html(one_line(token.refused[0].text, _LOOK))}</del>'
        style = _tint(track.lane.terms.sources, token.by) if token.kind == "accepted" else own.get(token.kind, "")
        yield f'<span class="{style}" data-t="{number}" {marks}>{_html(token.text)}</span>'
        said += token.text
    if track.text.startswith(said):  # the rest: all text of a beam search, or a character that was cut off
        yield _html(track.text[len(said) :])


# -- what the script reads ---------------------------------------------------------------------------


def _data(answer: PageAnswer, texts: dict[str, int]) -> Json:
    rounds = [track for track in answer.tracks if track.steps]
    return {
        "question": answer.question,
        "text": answer.text,
        "models": dict(answer.models),
        "settings": shown_settings(answer.settings),
        "fixed": {rule: fixed_by(answer.settings, rule) for rule in RULES},
        "telling": answer.tracks.index(explained_track(rounds)) if rounds else None,  # the lane that is explained
        "lanes": [_lane(track, texts) for track in answer.tracks],
    }


def _lane(track: Track, texts: dict[str, int]) -> Json:
    lane, window, rule = track.lane, Window(track.decode), rule_of(track.lane)
    return {
        "name": lane.name,
        "title": title_of(lane),
        "rule": rule_text(lane),
        "figures": rounds_of(track, _LOOK).labels()[1:] if lane.terms.drafts and lane.beams is None else [],
        "sources": lane.terms.sources,
        "stats": track.answer().stats.to_json(),
        "rounds": [_round(read(step, window), rule in ("match", "ratio")) for step in track.steps],
        "decides": rule,
        "tokens": [_token(token, texts, rule) for token in tokens_of(track)],
    }


def _round(traced: TracedRound, by_chance: bool) -> Json:
    step, drafts = traced.step, []
    for draft in traced.drafts:
        node, chance = draft.number - 1, draft.chance if by_chance else None
        position = (node, step.parents[node], step.depths[node], draft.branch)
        figures = map(_short, (draft.q, draft.p, chance, draft.coin, *(draft.compared or ())))
        drafts.append(_known([*position, draft.text, draft.source, draft.fate, *figures]))
    ms = [round(1000 * part, 4) for part in (step.draft_s, step.verify_s, step.sample_s, step.overhead_s)]
    return {"says": phases(step), "ms": ms, "drafts": drafts}


def _token(token: SaidToken, texts: dict[str, int], rule: str) -> Json:
    drafts: list[SaidToken | Refused] = [token, *token.refused]
    figures = {  # empty ones are left out, as is a rule that is the lane's
        **{name: getattr(token, name) for name in ("token", "round", "kind", "by")},
        "rule": "" if token.rule == rule else token.rule,
        "shown": token.shown,
        "entropy": _short(token.entropy),
        "said": decided(token, _LOOK),
        "choices": [_choice(choice, texts) for choice in token.choices],
        "coins": {draft.token: _short(draft.number) for draft in drafts if draft.number is not None},
        "rest": [_short(mass) for mass in token.rest],
    }
    return {name: value for name, value in figures.items() if value not in ("", {}, []) or name == "shown"}


def _choice(choice: Candidates, texts: dict[str, int]) -> list[PageCell]:
    """Return the columns of a choice, without the unknown ones at the end."""
    if (choice.rank or 1) > LISTED and not choice.fate:
        choice = choice._replace(processed=None)  # it is listed only in a what-if, which does not show that column
    figures = (_short(getattr(choice, name)) for name in CHOICES[2:])
    return _known([texts.setdefault(choice.text, len(texts)), choice.token, *figures])


def _known(row: list[PageCell]) -> list[PageCell]:
    while row[-1] in (None, ""):
        row.pop()
    return row


def _short(value: PageCell) -> PageCell:
    return float(f"{value:.4g}") if isinstance(value, float) else value
