"""/inspect and /branches: an answer token by token, another token in the place of one, and the answers that grew so.

Errors that a user can mend are raised as UserError. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.console.answer import UNANSWERED, answer
from app.console.chat_commands import back_to, last_answer
from app.screen.inspection import Force, Inspection, forced_hint
from app.screen.live import look_of
from app.screen.rows import Lines, fit, one_line
from app.screen.viewer import view
from utils.errors import UserError

if TYPE_CHECKING:
    from app.console.state import ConsoleState


def inspect(state: ConsoleState, number: int | None) -> None:
    """Walk over the last answer from token `number` on; without a terminal all tokens, or what is known of one."""
    answered, look = last_answer(state), look_of(state.out, state.settings).sized()
    if answered.tracks[-1].lane.beams is not None:
        raise UserError("a beam search has no tokens to inspect")
    tokens = answered.tokens
    if not 1 <= (number or 1) <= len(tokens):
        raise UserError(f"there is no token {number or 1}: the answer has {len(tokens)}")
    forces = state.chat is not None and state.chat.turns[-1:] == [answered.turn]
    content = Inspection(tokens, (number or 1) - 1, before=answered.before, forces=forces)
    if not state.live:
        return state.say(Lines(content.listed(look) if number is None else content.panel(look), look))
    wanted = view(content, lambda: look_of(state.out, state.settings))
    if isinstance(wanted, Force):
        return force(state, wanted)
    look = look_of(state.out, state.settings).sized()  # it may have another size now
    return state.say(Lines(content.panel(look), look))


def force(state: ConsoleState, wanted: Force) -> None:
    """Cut the last answer and go on from the token that is wanted there."""
    chat = state.said()
    begun = len(chat.turns[-1].answer) - len(last_answer(state).tokens)  # tokens that nothing is known of
    plan = chat.plan_force(begun + wanted.position, wanted.token)
    look = look_of(state.out, state.settings)
    state.hint(forced_hint(chat.text(list(plan.answer)), wanted.position + 1, look))
    if not answer(plan, state):
        return state.hint(UNANSWERED)
    return state.hint(f"branch {len(chat.branches)} of {len(chat.branches)} (/branches lists them, /undo goes back)")


def branches(state: ConsoleState, number: int | None) -> None:
    """List the branches of the last answer, or go on with one of them."""
    chat = state.said()
    if not chat.branches:
        raise UserError("the last answer has no branches: /inspect, then Enter on another token, makes one")
    if number is not None:
        chat.take_branch(number)
        return back_to(state, f"branch {number} of {len(chat.branches)}")
    look = look_of(state.out, state.settings)
    for at, turn in enumerate(chat.branches, start=1):
        now, text = "*" if turn is chat.turns[-1] else " ", one_line(turn.text, look)
        cut = ""
        if turn.origin is not None:
            pairs = zip(turn.answer, turn.origin.answer, strict=False)
            position = next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
            origin = next((i for i, one in enumerate(chat.branches, start=1) if one is turn.origin), None)
            cut = f"from {origin or '-'} at token {position + 1}: "
        state.say(fit(f"{now}{at}  {cut}{text}", look.width, look))
    return None
