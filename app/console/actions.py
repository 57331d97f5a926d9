"""What each command of the console does; satisfies :class:`app.console.handlers.ConsoleActions`.

Errors that a user can mend are raised as UserError and shown by whoever dispatched the command.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from app.chat.conversation import Turn
from app.chat.saved import as_json, as_text, local_clipboard, osc52
from app.console.state import Desk
from app.screen.terminal import usual_keys
from utils.errors import UserError
from utils.files import write_text

if TYPE_CHECKING:
    from app.chat.answered import Answered


_CLIPBOARD_LIMIT = 74_994  # bytes that terminals take by control sequence


class Actions(Desk):
    """The desk with everything that commands ask for."""

    # -- models -------------------------------------------------------------------------------

    def load_pair(self, name: str | None) -> None:
        from app.lanes.pairing import choose_pair

        if name is None:
            state = "loading" if self.pairs.job else "loaded" if self.pairs.engine else "not loaded"
            return self.say(f"pair = {self.pairs.name} ({state}); there are {', '.join(self.pair_names())}")
        spec = choose_pair(self.options, name)
        layers = self.layers.resolve(spec.defaults)
        return self._switch(name, lambda *job: self.pairs.loader(spec, self.options, *job), spec=spec, layers=layers)

    def load_drafter(self, name: str | None) -> None:
        from app.console.loading import load_another_drafter

        if name is None:
            spec = self.pairs.engine.loaded.spec if self.pairs.engine else self.pairs.spec
            return self.say(f"drafter = {spec.drafter_name if spec else 'none is loaded'}")
        engine = self.engine()
        return self._switch(name, lambda *job: load_another_drafter(engine, name, self.options, *job))

    def _switch(self, label: str, work: Any, *, spec: Any = None, layers: Any = None) -> None:
        """Load and take over; whatever goes wrong, the old pair and its settings stay."""
        old = (self.pairs.engine, self.pairs.spec, self.layers)
        engine = self.pairs.switch(label, work, self.out, self.stop, live=self.live)
        self.pairs.spec, self.layers = spec or engine.loaded.spec, layers or self.layers
        try:
            self.adopt(engine)
        except UserError:
            self.pairs.engine, self.pairs.spec, self.layers = old
            raise

    def info(self) -> None:
        from app.console.about import info

        if self.pairs.engine is None and self.pairs.job is not None:
            return self.say(f"{self.pairs.name}: {self.pairs.job.status}")
        engine = self.engine()
        assert self.chat is not None
        return self.say(info(engine, self.chat))

    def paces(self) -> str:
        from app.console.about import pace_text

        engine = self.pairs.engine
        return pace_text(engine, self.settings) if engine is not None else ""

    # -- the conversation ---------------------------------------------------------------------

    def system(self, text: str | None) -> None:
        if text is not None:
            self.change(system=text)
        self.say(f"system = {self.settings.system or '(none)'}")

    def clear(self) -> None:
        if self.chat is not None:
            self.chat.clear()
        if self.pairs.engine is not None:
            self.pairs.engine.forget()
        self.say("conversation cleared")

    def undo(self) -> None:
        self.kept = self.talk().undo().user
        self.say("the last message is taken back, it is in the input line")

    def regen(self) -> None:
        self.decode(self.talk().plan_regen())

    def continue_(self) -> None:
        self.decode(self.talk().plan_continue())

    def edit(self, text: str) -> None:
        chat = self.talk()
        last, editor = chat.turns[-1].user, os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not text and not (editor and self.live):
            self.kept, self.editing = last, True
            self.hint("Enter sends it in place of the last message")
            return
        new = text or edited(last, editor or "")
        if new.strip() in ("", last.strip()):
            self.say("the message is as it was: nothing was sent")
            return
        self.decode(chat.plan_edit(new))

    def copy(self) -> None:
        text = self.talk().turns[-1].text
        sequence = osc52(text)
        sent = self.live and len(sequence) <= _CLIPBOARD_LIMIT
        if sent:
            self.out.file.write(sequence)
            self.out.file.flush()
        if not (local_clipboard(text) or sent):
            raise UserError("no clipboard here: the answer is above, or /save FILE.txt")
        self.say(f"copied the last answer, {len(text):,} characters")

    def save(self, path: Path) -> None:
        from app.chat.export import EXPORTS

        chat, ending = self.talk(), path.suffix.lower()
        if ending == ".json":
            text = self.saved()
        else:
            text = self._page(ending) if ending in EXPORTS else as_text(chat.turns, chat.system)
        write_text(path, text)
        self.say(f"saved {len(chat.turns)} turn{'s' if len(chat.turns) != 1 else ''} to {path}")

    def saved(self) -> str:
        """The conversation as /load reads it."""
        chat, spec = self.talk(), self.pairs.spec
        about = {"pair": self.pairs.name, "drafter": spec.drafter_name if spec else None, "system": chat.system}
        return as_json(list(chat.turns), {**about, "tokenizer": self._tokenizer()})

    def _tokenizer(self) -> str:
        """What tells apart tokenizers whose ids mean different tokens, and how their prompts are read."""
        from utils.loading.fit import fingerprint

        assert self.chat is not None
        return fingerprint(self.chat.tokenizer) + (" encoder" if self.chat.single else "")  # type: ignore[arg-type]

    def _page(self, ending: str) -> str:
        """The conversation as something to look at."""
        from app.chat import export

        chat = self.talk()
        turns = [export.Shown(turn, self._answered(turn)) for turn in chat.turns]
        if ending == ".md":
            return export.markdown(turns, self.settings, chat.system)
        console = export.drawing()
        export.draw(console, turns, self.settings)
        return export.svg(console) if ending == ".svg" else export.html(console)

    def _answered(self, turn: Turn) -> list[Answered]:
        """The decodings of a turn; none where its figures are not there, or its ids are another tokenizer's."""
        from app.chat.saved import answered_of

        assert self.chat is not None
        try:
            return answered_of(turn, self.chat.text)
        except UserError:
            return []

    def load(self, path: Path) -> None:
        from app.chat.saved import read_chat

        kept, engine = read_chat(path), self.engine()
        assert self.chat is not None
        same = kept.tokenizer in (None, self._tokenizer()) and self.chat.reads(kept.turns, engine.target.vocab_size)
        layers = self.layers if kept.system == self.settings.system else self.layers.with_set(system=kept.system)
        self.chat.load(kept.turns, kept.system, same=same)
        self.layers = layers
        self.latest = next(reversed(self._answered(self.chat.turns[-1])), None) if same else None
        count = f"{len(kept.turns)} turn{'s' if len(kept.turns) != 1 else ''}"
        self.say(f"loaded {count} from {path}" + (f", system = {kept.system}" if kept.system else ""))
        if not same:
            self.hint(
                "made with another tokenizer: the conversation goes on from its texts, without figures and traces"
            )
        elif self.latest is None:
            self.hint("the file has no figures of its last answer: no /stats and /trace of it")

    # -- many prompts -------------------------------------------------------------------------

    def prompts(self, name: str) -> None:
        from app.console.tryout import ask_all

        ask_all(self, name)

    def bench(self, gammas: Sequence[int | str]) -> None:
        from app.console.tryout import time_lanes

        time_lanes(self, gammas)

    # -- looking back -------------------------------------------------------------------------

    def _last(self) -> Any:
        if self.latest is not None:
            return self.latest
        if self.chat is not None and self.chat.turns:
            raise UserError("the last answer was loaded without its figures")
        raise UserError("no answer yet")

    def stats(self, which: str) -> None:
        from app.console.about import last_stats, session_stats, stats_json

        if which == "json":
            self.out.print(Text(stats_json(self._last())), soft_wrap=True)
        elif which == "session":
            if not self.answers:
                raise UserError("no answer yet in this session")
            self.say(session_stats(self.answers, self.out, self.settings))
        else:
            self.say(last_stats(self._last(), self.out, self.settings))

    def trace(self, rounds: int | None) -> None:
        from app.screen.live import traced

        self.say(traced(self._last().tracks, self.out, self.settings, rounds))

    def plot(self, which: str) -> None:
        from app.screen.live import look_of
        from app.screen.plots import gamma_bars, position_bars

        last = self._last()
        if which == "gamma" and not self.answers:
            raise UserError("/plot gamma needs an answer of this run: the last one was loaded")
        look = look_of(self.out, self.settings).sized(height=None)
        tracks = [answered.tracks for answered in self.answers]
        for bars in [gamma_bars(tracks, look)] if which == "gamma" else position_bars(last.tracks, look):
            self.say(bars)

    def exit(self) -> None:
        self.leaving = True


def edited(text: str, editor: str) -> str:
    """`text` as the user left it in the editor. UserError if that cannot be run or fails."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "message.txt"
            file.write_text(text, encoding="utf-8")
            with usual_keys():
                subprocess.run([*shlex.split(editor), str(file)], check=True)
            return file.read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise UserError(f"the editor {editor!r} failed: {error} (nothing was sent)") from None
