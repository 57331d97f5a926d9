"""What the console says about itself: the header, /info, /stats. Knows how to describe, not how to decode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from app.chat.saved import Answered
from app.lanes.answers import Answer, comparisons_of, promise
from app.lanes.costs import Terms, cost_lines
from app.screen.figures import PaneData, StatsLines
from app.screen.live import look_of
from app.screen.palette import Look
from app.screen.rows import plural, visible
from app.screen.view import Summary, drafter_name, dtype_name, heading, kernels_of, models_of
from app.settings.table import Settings
from sampling.stats.summary import Stats, disturbed, merge, speedup_over
from utils.loading.loaded import NO_LIMIT, limit_text

if TYPE_CHECKING:
    from app.chat.conversation import Conversation
    from app.lanes.lane import PairEngine
    from utils.loading.loaded import LoadedModel


_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def welcome(settings: Settings) -> str:
    """Two lines for who starts the console: what the panes show, and what to do first."""
    lanes = ", ".join(settings.compare)
    panes = "Two panes show each answer: plainly, and with drafts."
    first = panes if settings.compare == ("ar", "spec") else f"A pane for each lane: {lanes}."
    return f"{first}\nTab: a first question. /help: the commands."


def header(engine: PairEngine, settings: Settings, console: Console) -> RenderableType:
    """The line over everything: models, place and settings."""
    look = look_of(console, settings)
    return heading(models_of(engine), settings, look, engine.mean_drafted(settings))


def _count(number: float) -> str:
    return next((f"{number / size:.3g}{unit}" for size, unit in _UNITS if number >= size), f"{number:.0f}")


def _model(model: LoadedModel) -> str:
    context = limit_text(model.context).removesuffix(" tokens")
    return (
        f"{model.name}: {_count(model.parameters)} parameters, {model.bytes / 1e6:,.0f} MB, {dtype_name(model)} "
        f"on {model.device}, context {context}, loaded in {model.seconds:.1f} s"
    )


def info(engine: PairEngine, chat: Conversation) -> str:
    """/info: pair, models, context."""
    loaded = engine.loaded
    if engine.server is not None:
        return f"pair     {loaded.spec.name}\ntarget   {loaded.target.name}, served at {engine.server.address}"
    used, prompts = len(chat.ids), "chat template" if chat.templated else "plain text"
    if chat.single:
        prompts = "each message by itself, as it is (the encoder reads it)"
    return "\n".join(
        [
            f"pair     {loaded.spec.name}",
            f"target   {_model(loaded.target)}",
            f"drafter  {_model(loaded.drafter) if loaded.drafter is not None else drafter_name(engine)}",
            *(f"  {name}  {_model(model)}" for name, model in loaded.cascade_models.items()),
            f"vocabulary {engine.target.vocab_size:,} ids, stop ids {', '.join(map(str, sorted(engine.stop_ids)))}",
            f"prompts  {prompts}",
            f"kernels  {kernels_of(loaded.target)}{', the whole pass as one' if engine.invariant else ''}",
            f"output   {promise(loaded.target.precision, engine.invariant)}",
            _context(used, engine.context),
        ]
    )


def _context(used: int, context: int) -> str:
    if context >= NO_LIMIT:
        return f"context  {used:,} tokens used, {limit_text(context)}"
    return f"context  {used:,} of {context:,} tokens used, {max(0, context - used):,} left"


def last_stats(answered: Answered, console: Console, settings: Settings) -> RenderableType:
    """/stats last: the figures of the last answer and how its lanes compare, with where the time went."""
    look = look_of(console, settings).sized(height=None)
    answers = answered.answers
    panes, lines = [track.pane() for track in answered.tracks], list[str]()
    for pane, answer in zip(panes, answers, strict=True):
        lines += [f"{pane.label}: {_times(answer.stats)}"]
        lines += [f"{' ' * len(pane.label)}  {line}" for line in cost_lines(answer.stats, answer.terms)]
    return Group(
        Summary(panes, look, comparisons_of(answers), legend=False), Text(visible("\n".join(lines)), style="dim")
    )


def _times(stats: Stats) -> str:
    parts = [("draft", stats.draft_ms), ("verify", stats.verify_ms), ("sample", stats.sample_ms)]
    shown = ", ".join(f"{name} {ms:.0f} ms" for name, ms in [*parts, ("other", stats.overhead_ms)])
    return f"{shown}; {stats.draft_n} drafted, {stats.draft_n_discarded} of them discarded"


def session_stats(answers: Sequence[Answered], console: Console, settings: Settings) -> RenderableType:
    """/stats session: every lane over the answers of this run, those of each pair and drafter by themselves."""
    look = look_of(console, settings).sized(height=None)
    by_models: dict[tuple[str, ...], list[Answered]] = {}
    for answered in answers:
        by_models.setdefault(tuple(answered.models.values()), []).append(answered)
    parts: list[RenderableType] = []
    for group in by_models.values():
        if len(by_models) > 1:
            models = group[0].models
            parts.append(Text(visible(f"{models['target']} {look.glyph('arrow')} {models['drafter']}")))
        parts += _lanes_of(group, look)
    return Group(*parts)


def _lanes_of(answers: Sequence[Answered], look: Look) -> list[RenderableType]:
    """The lanes of answers by the same models. A speed-up is that over the answers which both lanes gave."""
    rows = [{answer.method: answer for answer in answered.answers} for answered in answers]
    lanes = {name: [row[name] for row in rows if name in row] for name in dict.fromkeys(chain(*rows))}
    merged = {name: merge(answer.stats for answer in lane) for name, lane in lanes.items()}
    seen = sum(any(track.pane().seen for track in answered.tracks) for answered in answers)
    lines = [plural(len(answers), "answer") + (f", {seen} of them seen before" if seen else "")]
    for name, stats in merged.items():
        both = [(row["ar"].stats, row[name].stats) for row in rows if name != "ar" and "ar" in row and name in row]
        lines += [f"{name}: {_over_both(both)}"] if both else []
        lines += [f"{name}: {line}" for line in cost_lines(stats, _shared(lanes[name]))]
    panes = [PaneData(name, (), stats, "done") for name, stats in merged.items()]
    return [StatsLines(panes, look), Text(visible("\n".join(lines)), style="dim")]


def _over_both(both: Sequence[tuple[Stats, Stats]]) -> str:
    """How fast a lane was beside plain decoding, over the answers of both whose timing was not disturbed."""
    sound = [pair for pair in both if not disturbed(*pair)]
    ratio, left_out = speedup_over(sound), len(both) - len(sound)
    both_gave = f"over {plural(len(sound), 'answer')} of both"
    rate = f"{ratio:.2f}x the rate of plain decoding {both_gave}" if ratio else "no speed-up"
    return rate + (f" ({plural(left_out, 'answer')} with disturbed timing left out)" if left_out else "")


def _shared(answers: Sequence[Answer]) -> Terms:
    """The terms of all these answers, or none where they differ: other models under the same names."""
    first = answers[0].terms
    same = all((one.terms.models, one.terms.sources) == (first.models, first.sources) for one in answers)
    return first if same else Terms()
