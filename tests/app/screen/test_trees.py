"""A tree on the screen: the pane shows the way taken and the best refused branch, the trace an indented tree."""

from dataclasses import replace

from app.screen.palette import Look
from app.screen.spans import Spanner
from app.screen.trace import Trace, read
from sampling.events import Call, Step
from tests.support.runs import measure
from utils.growing_text import Window

WORDS = {1: " the", 2: " cat", 3: " dog", 4: " sat", 5: " ran", 6: " bird", 7: " flew", 8: " on"}
OPENING = Step(0, 0, (), (), (), (), 1, (), (), 2.0, (Call("target", 1, 0.01),), 0.0, 0.01, 0.0)
# cat — sat, ran;  dog — flew;  bird.  The target takes cat, then neither sat nor ran.
TREE = Step(
    row=0,
    gamma=2,
    drafted=(2, 4, 3, 6, 5, 7),
    parents=(-1, 0, -1, -1, 0, 2),
    source=(0,) * 6,
    path=(0,),
    token=8,
    target_p=(0.5, 0.1, 0.05),
    draft_p=(0.4, 0.3, 0.2),
    top2_gap=1.0,
    calls=(Call("target", 1, 0.01),),
    draft_s=0.001,
    verify_s=0.01,
    sample_s=0.0,
)


def decode(ids: list[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def spans(step: Step) -> list[tuple[str, str]]:
    spanner = Spanner(decode, drafting=True)
    spanner.feed(OPENING)
    spanner.feed(step)
    return [(span.text, span.kind) for span in spanner.spans]


def test_a_tree_and_its_branches() -> None:
    assert TREE.is_tree
    assert (TREE.depths, TREE.rejected, TREE.branch) == ((0, 1, 0, 0, 1, 1), (1, 4), (1,))
    nothing = replace(TREE, path=())
    assert (nothing.rejected, nothing.branch) == ((0, 2, 3), (0, 1))
    chain = replace(TREE, drafted=(2, 4, 3), parents=(-1, 0, 1), path=(0,))
    assert not chain.is_tree
    assert chain.branch == (1, 2) == (*chain.rejected, *chain.discarded)


def test_the_pane_shows_the_way_taken_and_one_branch() -> None:
    assert spans(TREE) == [(" the", "target"), (" cat", "accepted"), (" sat", "rejected"), (" on", "target")]
    assert spans(replace(TREE, path=())) == [
        (" the", "target"),
        (" cat", "rejected"),
        (" sat", "discarded"),
        (" on", "target"),
    ]
    # A sibling is taken: the refused first child of its level is not the row's last word.
    assert spans(replace(TREE, path=(2, 5), token=8))[1:] == [(" dog flew", "accepted"), (" on", "bonus")]


def test_the_trace_reads_downwards_siblings_on_a_line_and_an_only_child_as_a_child() -> None:
    found = read(TREE, Window(decode))
    told = [(draft.number, draft.branch, draft.text, draft.fate) for draft in found.drafts]
    assert told == [
        (1, "├─ ", " cat", "accepted"),
        (2, "│  ├─ ", " sat", "rejected"),
        (5, "│  └─ ", " ran", "rejected"),
        (3, "├─ ", " dog", "discarded"),
        (6, "│  └ ", " flew", "discarded"),
        (4, "└─ ", " bird", "discarded"),
    ]
    assert [(draft.q, draft.p) for draft in found.drafts[:3]] == [(0.4, 0.5), (0.3, 0.1), (0.2, 0.05)]


def test_the_trace_as_text() -> None:
    look = Look(width=80, height=None, color=False, ascii=True)
    lines = ["".join(part.text for part in row).rstrip() for row in Trace([OPENING, TREE], decode, look).rows()]
    drafts = [line for line in lines if '"' in line and line.lstrip()[0].isdigit()]
    assert [line[:16].rstrip() for line in drafts] == [
        ' 1  |- " cat"',
        ' 2  |  |- " sat"',
        ' 5  |  `- " ran"',
        ' 3  |- " dog"',
        ' 6  |  ` " flew"',
        ' 4  `- " bird"',
    ]
    assert "accepted" in drafts[0]
    assert [line.split()[-1] for line in drafts[1:3]] == ["rejected", "rejected"]


def test_a_round_refuses_once() -> None:
    """R is at most one a round, so that alpha is the chance that a depth is passed."""
    stats = measure([OPENING, TREE, replace(TREE, path=(0, 4))])
    assert (stats.draft_n, stats.draft_n_accepted, stats.draft_n_rejected) == (12, 3, 1)
    assert (stats.examined_at, stats.accepted_at, stats.alpha) == ((2, 2), (2, 1), 0.75)
