"""The same token in passes of different width: how far its logits lie apart, and how many greedy tokens flip.

`python -m tests.support.precision float32 bfloat16 float16` measures the default target, a line a dtype and width; the
figures stand in docs/notes.md and in app/lanes/answers.py. Knows no drafters: plain decoding's own tokens are the
drafts.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from sampling.types import LM, Draft, Rows

LENGTH, WIDTHS = 20, (5, 8)


def compared(lm: LM, prompts: Rows, widths: Sequence[int], length: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each width and token of a greedy answer: the width, and its logits [V] in a pass over one token and in one
    over so many."""

    for prompt in prompts:
        session, row, alone = lm.open([prompt]), list(prompt), []
        for _ in range(length):
            session.rollback([row])
            alone.append(session.score([row], Draft.empty(1))[0, 0].float())
            row = [*row, int(alone[-1].argmax())]
        for width in widths:
            for at in range(0, length, width):
                begun, drafts = row[: len(prompt) + at], row[len(prompt) + at :][: width - 1]
                session.rollback([begun])
                wide = session.score([begun], Draft.of([drafts]))[0].float()
                for one, other in zip(alone[at : at + width], wide, strict=False):
                    yield width, one, other


class Apart(NamedTuple):
    """The largest difference of two logits of one id, and of two top-2 gaps; how many greedy tokens flip."""

    logits: float
    gaps: float
    flips: int


def apart(found: Sequence[tuple[Tensor, Tensor]]) -> Apart:
    """How far passes lie apart: the logits [V] of each token in the one and in the other."""
    gaps, flips = [0.0], 0
    for one, other in found:
        best = int(one.argmax())  # of equal ones the first, as everywhere
        second = next(token for token in one.topk(2).indices.tolist() if token != best)
        gaps.append(abs(float((one[best] - one[second]) - (other[best] - other[second]))))
        flips += int(other.argmax()) != best
    return Apart(max(float((one - other).abs().max()) for one, other in found), max(gaps), flips)


def main(dtypes: Sequence[str]) -> None:
    from app.lanes.lane import PairEngine
    from app.lanes.pairing import catalogue_in
    from tests.sampling.test_identity_real import PROMPTS
    from utils.loading.loaded import LoadOptions
    from utils.loading.loading import load_pair

    spec = catalogue_in("models.yaml").pair().model_copy(update={"drafter": "none"})
    for dtype in dtypes:
        engine = PairEngine(load_pair(spec, LoadOptions(device="cpu", dtype=dtype)))
        prompts = [
            list(
                engine.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                )
            )
            for text in PROMPTS.values()
        ]
        found = list(compared(engine.target, prompts, WIDTHS, LENGTH))
        for width in WIDTHS:
            pairs = [(one, other) for wide, one, other in found if wide == width]
            worst = apart(pairs)
            sys.stdout.write(
                f"{dtype}, passes over 1 and {width}: logits up to {worst.logits:.2g} apart, "
                f"top-2 gaps up to {worst.gaps:.2g}, {worst.flips} of {len(pairs)} greedy tokens flip\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:] or ["float32", "bfloat16"])
