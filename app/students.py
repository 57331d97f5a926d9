"""A pair's trained drafters in memory: each is built from its folder when first asked for, checked, and kept.

Knows which class drafts with which kind of student; knows no lanes and no settings.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sampling.causal import CausalLM
from sampling.drafters import FeatureDrafter, GlideLM, ModelDrafter
from sampling.drafters.expand import Expansion
from sampling.drafters.feature import FeatureLM
from sampling.drafters.feature_tree import FeatureTreeDrafter
from sampling.student import Student
from sampling.student_file import load_student, read_config
from sampling.student_network import StudentNetwork
from sampling.types import LM, Drafter
from utils.errors import UsageError, UserError
from utils.fit import fingerprint
from utils.specs import trained_kind

if TYPE_CHECKING:
    from utils.loading import LoadedPair

WITHOUT = "--drafter ngram goes without"


class UnusableDrafterError(UserError):
    """The pair's own drafter cannot be used: `why` names the file, the text also says what goes without it."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"{why[:-1]}, {WITHOUT})" if why.endswith(")") else f"{why} ({WITHOUT})")


class Students:
    """The trained drafters of a loaded pair, by kind: "plain", "glide" or "feature"."""

    def __init__(self, loaded: LoadedPair, target: CausalLM) -> None:
        self._loaded, self._target = loaded, target
        self._fresh: dict[str, ModelDrafter] = {}  # of each kind one that never starts
        self._agreement: dict[str, float] = {}

    def folder(self, kind: str) -> Path:
        """Where the student lies: the pair's drafter if it is of this kind, else the pair's `students`.

        UsageError if the pair has none or its folder is not there.
        """
        own = self._loaded.student
        if trained_kind(self._loaded.drafter_kind) == kind and own is not None and own.is_dir():
            return own
        return self._loaded.spec.student(kind)

    def lm(self, kind: str) -> LM:
        """What the drafter of this kind drafts from; UserError names a file that cannot be used."""
        if kind not in self._fresh:
            self._fresh[kind] = self._build(kind)
        return self._fresh[kind].lm

    def agreement(self, kind: str) -> float:
        """How often its likeliest token was the target's on held-out text, as its training found; 0 if it says not."""
        if kind not in self._agreement:
            self._agreement[kind] = _agreement(read_config(self.folder(kind)))
        return self._agreement[kind]

    def drafter(
        self, kind: str, least: float = 0.0, expansion: Expansion | None = None, dynamic: bool = False
    ) -> Drafter:
        """A new drafter of this kind, on the weights of those before it; UserError as :meth:`lm`.

        `least` and `expansion` as in :class:`ModelDrafter`. `dynamic`: dynamic trees, from the kind that can (feature).
        """
        lm = self.lm(kind)
        if dynamic and isinstance(lm, FeatureLM):
            return FeatureTreeDrafter(lm, least, expansion)
        made = copy.copy(self._fresh[kind])
        made.least, made.expansion = least, expansion
        return made

    def _build(self, kind: str) -> ModelDrafter:
        if (target := self._loaded.target).encodes:
            raise UsageError(f"lane {kind}: {target.name} is an encoder-decoder model, which has no trained drafters")
        student = self._load(kind)  # released here: what decodes keeps packed weights of its own
        if kind == "feature":
            return FeatureDrafter(student, vocab_size=self._target.vocab_size)
        if kind == "glide":
            layers = self._target.network.layers
            return ModelDrafter(GlideLM(student, layers, vocab_size=self._target.vocab_size))
        return ModelDrafter(CausalLM(StudentNetwork(student), kind, self._target.vocab_size))

    def _load(self, kind: str) -> Student:
        loaded, place = self._loaded, self.folder(kind)
        student = load_student(place, loaded.target.model, fingerprint(loaded.tokenizer))
        if student.config.kind != kind:
            raise UserError(f"the drafter {place} is a {student.config.kind} drafter, not a {kind} one")
        network = self._target.network
        student.rounded = True
        if network.device.type == "cpu":
            return student  # float32, which is what can be packed
        return moved(student, network.device, network.dtype, loaded.target.model)


def moved(student: Student, device: torch.device, dtype: torch.dtype, target: Any) -> Student:
    """The student's parameters on `device` in `dtype`, its angles in float32, a shared embedding the target's own."""
    student = student.to(device)
    for parameter in student.parameters():
        parameter.data = parameter.data.to(dtype)
    embedding = target.get_input_embeddings().weight
    if student.config.shared_embedding and embedding.dtype == dtype:
        student.model.embed_tokens.weight = embedding
    return student


def described(kind: str, folder: Path) -> str:
    """One line about a student from its configuration; UserError if that cannot be read."""
    told = read_config(folder)
    layers, ids = told.get("num_hidden_layers"), told.get("short_list")
    parts = [
        f"{layers} layer{'' if layers == 1 else 's'} of width {told.get('hidden_size')}",
        f"short list of {ids:,} ids" if isinstance(ids, int) and ids else "head of the whole vocabulary",
    ]
    if isinstance(size := told.get("bytes"), int):
        parts.append(f"{size / 1e6:.1f} MB")
    parts.append(_origin(told))
    return f"{kind}: {', '.join(filter(None, parts))} ({folder})"


def _agreement(told: dict[str, Any]) -> float:
    try:
        return float(told["held_out"]["held"]["alpha"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        return 0.0


def _origin(told: dict[str, Any]) -> str:
    target, date = told.get("target"), told.get("date")
    made = f"trained for {target}" if target else ""
    return f"{made} on {date}" if made and date else made or (f"of {date}" if date else "")
