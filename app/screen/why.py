"""Why an answer was as fast as it was: one paragraph made of its figures, and one thing to try.

The time of a round is measured in tokens of plain decoding: the tokens that the round emits, over those that plain
decoding emits in the same time, are the speed-up. Its cost beyond one plain token is divided among the sources of
drafts: a model's calls to its source, wider passes and the rest by the number of drafts. The speed-up at another gamma
is estimated from the same rounds, with their drafts cut or continued to it. Knows no models. No torch.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat

from app.lanes.answers import speed_of
from app.lanes.costs import seen_before
from app.screen.inspection import SaidToken
from app.screen.live import Track, explained_track, tokens_of
from app.screen.panes import counted, reported_line, title_of
from app.screen.rows import plural
from app.settings.types import enumerated
from sampling.drafters.registry import LANES
from sampling.stats.summary import disturbed
from sampling.stats.theory import efficiency

FEW = 8  # rounds, or drafts of a source, below which nothing is concluded from them
GAIN = 1.05  # least expected speed-up, over the answer's own, of a change worth trying
SHOWN = (1, 2, 4, 6, 8, 16)  # gammas whose speed-up is listed
# Where no other lane ran beside it: the words in place of a comparison with plain decoding.
ALONE = {"ar": "plain decoding", "beam": "a search"}
FIRST, NAMES, NUMBERS, CODE, OTHER = KINDS = ("first words of sentences", "names", "numbers", "code", "other tokens")
# How a draft's position in its round is named; the kinds of tokens at which a draft was examined.
PLACES, EXAMINED = ("first drafts", "second ones", "later ones"), ("accepted", "correction")
_MARKUP = " \t*_#>-\"'“‘([`"  # characters that may stand between two sentences


def kinds_of(tokens: Sequence[SaidToken], before: str = "") -> list[str]:
    """Return the kind of each token, by the text around it: within backticks, with a digit, of a capitalised word."""
    text, starts = before, accumulate((len(token.text) for token in tokens), initial=len(before))
    text += "".join(token.text for token in tokens)
    return [_kind(text, start, token.text) for start, token in zip(starts, tokens, strict=False)]


def _kind(text: str, start: int, token: str) -> str:
    at = start + len(token) - len(token.lstrip())
    head, line = re.findall(r"[\w'’-]*\Z", text[:at])[0], text[text.rfind("\n", 0, at) + 1 : at].replace("```", "")
    tail, before = re.findall(r"^[\w'’-]*", text[at:])[0], text[: at - len(head)].rstrip(_MARKUP)
    word = head + tail if tail else ""
    cases = (
        (CODE, text.count("```", 0, at) % 2 or line.count("`") % 2),
        (NUMBERS, any(map(str.isdigit, token))),
        (OTHER, not word[:1].isupper() or re.split("['’]", word)[0] == "I"),
        (NAMES, before and before[-1] not in ".!?:…\n"),
        (FIRST, not head),
    )
    return next((kind for kind, holds in cases if holds), OTHER)


class Why:
    """The explanation of an answer's speed, by its last lane that drafted; `runs` returns whether the pair can run a
    lane of this name."""

    def __init__(self, tracks: Sequence[Track], runs: Callable[[str], bool] = lambda word: False) -> None:
        track = explained_track(tracks)
        self.lane, self.gamma, self.runs = track.lane, track.lane.terms.gamma, runs
        self.stats, self.rounds, self.tokens = track.meter.stats, track.steps[1:], tokens_of(track)
        self.kinds = kinds_of(self.tokens, track.decode(list(track.before)) if track.before else "")
        self.plain = next((each.meter.stats for each in tracks if each.lane.name == "ar" != self.lane.name), None)
        stats, plain, self.seen = self.stats, self.plain, seen_before(track.meter.stats, track.lane.terms)
        rate = plain.predicted_per_second if plain and not disturbed(plain, stats) else None
        self.token_ms = 1000 / rate if rate and stats.predicted_per_second else 0.0  # of plain decoding; 0: not known
        self.speedup = self.token_ms * (stats.predicted_per_second or 0.0) / 1000
        # `free`: the speed-up if drafting cost nothing; `perfect`: if all drafts were accepted.
        self.free = self.speedup * stats.predicted_ms / ((stats.predicted_ms - stats.draft_ms) or 1)
        self.drafted_depth = sum(step.length for step in self.rounds)
        self.perfect = (self.drafted_depth + len(self.rounds)) * self.token_ms / (stats.predicted_ms or 1)
        calls = [stats.call_ms.get(name, 0.0) for name in self.lane.terms.sources]
        shared = max(0.0, stats.predicted_ms - stats.target_passes * self.token_ms - sum(calls)) / (stats.draft_n or 1)
        self.saved = [  # milliseconds that the drafts of each source saved
            kept * self.token_ms - spent - shared * drafted
            for (drafted, kept), spent in zip(stats.sources, calls, strict=False)
            if self.token_ms
        ]
        narrow = stats.target_passes * plain.verify_ms / plain.target_passes if plain and rate else stats.verify_ms
        # The seconds that each draft adds to a pass.
        self.width_s = max(0.0, stats.verify_ms - narrow) / 1000 / (stats.draft_n or 1)
        # At most twice the longest draft: for longer ones costs are unknown.
        self.gammas = range(1, 1 + 2 * max((step.length for step in self.rounds), default=0))
        self.best = max(self.gammas, key=self.at) if self.token_ms and self.gamma and stats.draft_n else 0
        # By position: the target's ranks of the draft accepted there, or of those rejected, as far as they are known.
        examined = [
            {
                choice.rank
                for choice in token.choices
                if choice.fate == ("said" if token.kind == "accepted" else "rejected")
            }
            - {None}
            for token in self.tokens
        ]
        self.likeliest, self.known = sum(1 in ranks for ranks in examined), sum(map(bool, examined))

    def at(self, gamma: int) -> float:
        """Return the speed-up to expect if these rounds had drafted `gamma` tokens deep.

        Longer drafts are cut; a draft that its own gamma ended is continued to that depth, at the answer's alpha.
        """
        tokens, spent, alpha = 0.0, 0.0, self.stats.alpha or 0.0
        for step in self.rounds:
            more = max(0, gamma - step.length) if 0 < step.gamma <= step.length else 0
            continued = efficiency(alpha, more) - 1 if len(step.path) == step.length else 0.0
            tokens += len(step.emitted) - max(0, len(step.path) - gamma) + continued
            drafting = step.draft_s * (more - max(0, step.length - gamma)) / max(1, step.length)
            spent += step.seconds + drafting + self.width_s * (more - sum(depth >= gamma for depth in step.depths))
        return tokens * self.token_ms / spent / 1000

    def __str__(self) -> str:
        return " ".join([*self._figures(), f"{self._advice()}."])

    def _figures(self) -> Iterator[str]:
        yield from self._time()
        if self.stats.draft_n:
            yield from self._drafts()
            yield from self._outlook()
        elif self.lane.terms.drafts:
            yield f"It drafted nothing in {plural(self.stats.target_passes, 'round')}."

    def _time(self) -> Iterator[str]:
        """Yield where the time went, in seconds and in tokens of plain decoding."""
        stats, whole, lane, per_round = self.stats, self.stats.predicted_ms, self.lane, self.token_ms * len(self.rounds)
        against, label = speed_of(self.plain, stats)[0] if self.plain else "", title_of(lane)
        against += {"r": " than plain decoding", "t": " as plain decoding"}.get(against[-1:], "")
        yield f"{label[:1].upper()}{label[1:]}: {counted(stats)}, {whole / 1000:.2f} s after the first"
        yield f"({against or ALONE.get(lane.name, 'without plain decoding beside it')})."
        if stats.served:
            yield f"It does not say where its time went; {reported_line(stats.report) or 'it reports no drafts'}."
        elif whole:
            parts = (stats.verify_ms, stats.draft_ms, stats.sample_ms + stats.overhead_ms)
            shares, end = [f"{part / whole:.0%}" for part in parts], ";" if per_round else "."
            yield "Passes took {} of the time, drafts {}, the rest {}".format(*shares) + end
            if per_round:
                yield f"a round brought {stats.tokens_per_pass:.2f} tokens and took as long as {whole / per_round:.2f}"
                each = [f"{part / per_round:.2f}" for part in parts]
                yield "plain ones ({} for its pass, {} for drafts, {} for the rest).".format(*each)

    def _drafts(self) -> Iterator[str]:
        """Yield which drafts were accepted and which rejected."""
        stats = self.stats
        saved = [f" ({'lost' if round(ms) < 0 else 'saved'} {abs(ms):.0f} ms)" for ms in self.saved] or repeat("")
        by_source = zip(self.lane.terms.sources, stats.sources, saved, strict=False)
        sources = [f"{name} {kept} of {drafted}{ms}" for name, (drafted, kept), ms in by_source if drafted]
        by = f": {', '.join(sources)}" if len(sources) > 1 else ""
        yield f"{stats.draft_n_accepted} of {stats.draft_n} drafts were accepted{by}."
        if stats.draft_n_rejected:
            places = [
                (PLACES[min(place, 2)], place == len(step.path))
                for step in self.rounds
                for place in range(len(step.path) + bool(step.rejected))
            ]
            kinds = [
                (kind, token.kind == "correction")
                for kind, token in zip(self.kinds, self.tokens, strict=True)
                if token.kind in EXAMINED
            ]
            by = f"; by kind of token {_listed(kinds, KINDS)}" if len({kind for kind, _ in kinds}) > 1 else ""
            yield f"Rejected: {_listed(places, PLACES)}{by}."

    def _outlook(self) -> Iterator[str]:
        """Yield the acceptance at temperature 0, and the speed-up at other gammas and with a perfect drafter."""
        if self.lane.settings.temperature and self.known:
            yield f"At temperature 0, {self.likeliest} of these {self.known} examined drafts would be accepted."
        if self.best:
            gammas = [gamma for gamma in self.gammas if gamma in (*SHOWN, self.gamma)]
            shown = [f"{self.at(gamma):.2f}x at {gamma}{' (now)' * (gamma == self.gamma)}" for gamma in gammas]
            best, longest = self.at(self.best), len(self.gammas) // 2
            near = [str(gamma) for gamma in gammas if gamma != self.best and self.at(gamma) > 0.985 * best]
            more = f" (beyond {longest}: estimated)" * (self.best > longest)
            more += f", {enumerated(near, 'and')} about the same" if near else ""
            yield f"By gamma: {', '.join(shown)}; best {best:.2f}x at {self.best}{more}."
        if self.token_ms and self.rounds:
            now = "these gammas" if self.gamma == "auto" else "this gamma"
            yield f"If drafting took no time: {self.free:.2f}x;"
            yield f"if every draft were accepted, at {now}: {self.perfect:.2f}x."

    # -- one thing to try ---------------------------------------------------------------------

    def _advice(self) -> str:
        """Return one thing to try, with its command."""
        stats, name, few = self.stats, self.lane.name, plural(self.stats.target_passes, "round")
        length = max(128, 4 * stats.predicted_n)
        longer = "a question with a longer answer" if stats.stop_reason != "length" else f"/length {length}"
        cases = {
            "python infer.py check TARGET DRAFTER --for vllm, which prints a server that drafts": stats.served,
            "/compare ar,spec: nothing was drafted here": not self.lane.terms.drafts,
            "another question: the timing was disturbed": self.plain and not self.token_ms,
            f"/compare ar,{name}: beside plain decoding it shows what drafts bring": not self.token_ms,
            "another question: these drafts were copied from an earlier answer with this text": self.seen,
            f"{longer}: {few} are too few to judge by": stats.target_passes < FEW,
            "a text that repeats itself: nothing could be looked up": not stats.draft_n,
        }
        if advice := next((text for text, holds in cases.items() if holds), ""):
            return f"Try {advice}"
        expected, command, reason = max(self._changes(), key=lambda change: change[0], default=(0.0, "", ""))
        if expected >= GAIN * self.speedup:
            return f"Try {command}: {reason}"
        if self.gamma != "auto":
            return f"No other gamma is expected to bring 5% more; keep /gamma {self.gamma}"
        dearest = max(self.tokens, key=lambda token: token.discarded + len(token.refused))
        lost = dearest.discarded + len(dearest.refused)
        shown = f"; /trace {dearest.round} shows the round that lost most drafts ({lost})" if lost else ""
        return f"Nothing is expected to bring 5% more{shown}"

    def _changes(self) -> Iterator[tuple[float, str, str]]:
        """Yield changes to try: the speed-up over plain decoding to expect, the command, the reason."""
        stats, names, beside = self.stats, self.lane.terms.sources, f"/compare ar,{self.lane.name},"
        few = (
            "even if drafting cost nothing, too few drafts are accepted"
            if self.perfect * self.free >= GAIN * self.speedup  # drafts, all accepted and at no cost, would pay
            else "a pass over several tokens is too dear"
        )
        dear = "drafting is too dear" if self.free >= GAIN else few
        cheap = next((word for word in ("tables", "ngram") if word not in names and self.runs(word)), "")
        depth = round(self.drafted_depth / sum(step.length > 0 for step in self.rounds))
        colder = (
            efficiency(self.likeliest / max(1, self.known), depth) / efficiency(stats.alpha or 0, depth) * self.speedup
        )
        if self.gamma != "auto":
            better = self.at(self.best)
            yield better * (self.best > 0), f"/gamma {self.best}", f"about {better:.2f}x, as these rounds say"
            yield float(self.free >= GAIN and cheap > ""), beside + cheap, f"{dear}, look-ups cost next to nothing"
        yield 1.0, "/compare ar (no drafts)", dear
        if self.lane.settings.temperature and self.known:
            yield colder, "/temperature 0", f"about {colder:.2f}x, as more drafts are accepted"
        if model := next((index for index, name in enumerate(names) if stats.calls.get(name)), 0):
            looked_up = "tables" if "tables" in names[:model] else names[model - 1]
            for word, left_out in ((looked_up, slice(model, None)), (names[model], slice(model))):
                alone = self.speedup * stats.predicted_ms / (stats.predicted_ms + sum(self.saved[left_out]))
                if word in LANES and sum(drafted for drafted, _ in stats.sources[left_out]) >= FEW:
                    yield alone, beside + word, f"about {alone:.2f}x without the drafts that lost time"


def _listed(drafts: Sequence[tuple[str, bool]], names: Sequence[str]) -> str:
    """Return, by name, how many of the examined drafts were rejected."""
    counts = {name: [rejected for each, rejected in drafts if each == name] for name in names}
    return ", ".join(f"{sum(fates)} of {len(fates)} {name}" for name, fates in counts.items() if fates)
