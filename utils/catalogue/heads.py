"""The kinds of trained draft heads, one row each: a new kind begins here.

The key of a row is its name in `--drafter`, in a pair's `students` and as `kind` in a head's configuration. Its titles
and its network are in its row of sampling/drafters/registry.py, its names in other programs in
app/measure/elsewhere.py.
"""

from typing import NamedTuple


class HeadKind(NamedTuple):
    """`published`: its files are in its authors' format, which is translated; else in this program's.
    `block`: it drafts a whole block in one pass.
    """

    published: bool = True
    block: bool = False


HEAD_KINDS = {
    "plain": HeadKind(published=False),
    "glide": HeadKind(published=False),
    "feature": HeadKind(published=False),
    "eagle": HeadKind(),
    "peagle": HeadKind(block=True),
    "dflash": HeadKind(block=True),
    "jetspec": HeadKind(block=True),
    "domino": HeadKind(block=True),
    "dflare": HeadKind(block=True),
    "dspark": HeadKind(block=True),
    "dflash2": HeadKind(block=True),
}
BLOCK_KINDS = tuple(word for word, kind in HEAD_KINDS.items() if kind.block)
PUBLISHED_KINDS = tuple(word for word, kind in HEAD_KINDS.items() if kind.published)
