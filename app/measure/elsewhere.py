"""`check --for`: the command or call that serves a pair in another program, and the parts that it cannot serve; and
the own flags of `check`.

Every text can be run as it is, in a shell or in Python; comments (`#`) say what differs from this program. Flags and
keys are those that the programs document:

- vLLM: docs/features/speculative_decoding/README.md (`--speculative-config` schema; commit 01ed47b), draft_model.md
  (04329df), `SpeculativeConfig` in vllm/config/speculative.py (002e77c), docs/features/quantization/gguf.md (06fed1c).
- SGLang: docs/advanced_features/speculative_decoding.md (commit fc6d465), and docs.sglang.io for DFLASH and DSPARK.
- transformers: `GenerationConfig` and generation/candidate_generator.py of 5.23.0.
- llama.cpp: common/arg.cpp (commit 0017d6f), in which `--draft-max` and `--draft-min` are removed; docs/speculative.md
  (commit a3a1c47: EAGLE-3); `common_speculative_types_from_gguf` in common/speculative.cpp (DFlash2's files are
  DFlash's, Gemma 4's assistants MTP's).

Knows no models, no measuring and no torch.
"""

import json
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from app.settings.table import Field, SettingValues, arguments, by_name
from app.settings.types import METHOD_NAMES, SWITCH, Choice, Number, NumberList, WholeList
from sampling.drafters.registry import ROWS
from utils.catalogue.heads import HEAD_KINDS
from utils.catalogue.templates import TEMPLATES
from utils.errors import holding, raise_first

ONCE = {"parallel_drafting": True}  # vLLM's option for drafters that draft a block in one pass
# By the kind of head or model in its authors' format: vLLM's method, llama.cpp's --spec-type and SGLang's algorithm;
# empty if the program has none.
PUBLISHED: Mapping[str, tuple[dict[str, object], str, str]] = {
    "eagle1": ({"method": "eagle"}, "", "EAGLE"),
    "eagle3": ({"method": "eagle3"}, "draft-eagle3", "EAGLE3"),
    "peagle": ({"method": "eagle3", **ONCE}, "", ""),
    "dflash": ({"method": "dflash"}, "draft-dflash", "DFLASH"),
    "jetspec": ({}, "", ""),
    "dflare": ({}, "", ""),
    "domino": ({}, "", ""),
    "dspark": ({"method": "dspark"}, "draft-dspark", "DSPARK"),
    "dflash2": ({}, "draft-dflash", ""),
    "pard": ({"method": "draft_model", **ONCE}, "", ""),
    "mtp": ({"method": "mtp"}, "draft-mtp", "EAGLE"),
    "assistant": ({"method": "mtp"}, "draft-mtp", ""),
}
PROMPT = "Why is the sky blue?"


@dataclass(frozen=True)
class Recipe:
    """The facts of a pair on which its command for another program depends.

    `target`, `drafter`: a hub id, a folder or a GGUF file. `word`: the drafter's word, of a published head a key of
    PUBLISHED. `gamma`: drafts a round. `lookup`: the longest n-gram that is looked up. `translated`: the drafter has
    another vocabulary. `compiled`: the weights of the compiled pass, "" if the pass is not compiled. `encodes`: an
    encoder reads the prompt. `template`: the chat template's name, "auto" for the tokenizer's own, "" without one.
    `notes`: further comments.
    """

    target: str
    word: str
    gamma: int
    drafter: str = ""
    lookup: int = 3
    translated: bool = False
    compiled: str = ""
    encodes: bool = False
    template: str = ""
    notes: tuple[str, ...] = ()

    @property
    def looks_up(self) -> bool:
        """Whether the other program's prompt lookup takes the drafter's place: of all but models and published
        heads."""
        return not self.encodes and self.word not in ("model", "none", *PUBLISHED)

    @property
    def named(self) -> bool:
        """Whether a program that reads no heads from GGUF files is given the drafter's name. It is not for an MTP
        layer in a GGUF file: there the layer comes with the target."""
        return bool(self.drafter) and not (self.word == "mtp" and _gguf(self.drafter))


def written(program: str, recipe: Recipe) -> str:
    """Return the text for `program`, one of PROGRAMS; only comments if it cannot serve the target at all."""
    about = PROGRAMS[program]
    notes, text = [about.documents, *_lacking(recipe, about.name)], ""
    if recipe.encodes and about.without_encoders:
        notes.append(about.without_encoders)
    else:
        text = about.command(recipe, notes)
    if recipe.template in TEMPLATES and program != "transformers":
        notes.append(f"for chats it needs the template {recipe.template} (--chat-template), which no file brings")
    return "\n".join([*(f"# {note}" for note in (*notes, *recipe.notes)), text]).rstrip()


def _lacking(recipe: Recipe, program: str) -> list[str]:
    """Return sentences about what the other program lacks of this drafter."""
    word, (first, _, head) = recipe.word, recipe.word.partition("+")
    nearest = recipe.looks_up and word != "ngram" and (word, program) != ("suffix", "vLLM")
    unread = word in PUBLISHED and _gguf(recipe.drafter) and program != "llama.cpp"
    return holding(
        {
            f"{program} has no {word}s of drafters": word in ROWS and ROWS[word].needs == "cascade",
            f"{program} reads no {head or first} heads of this program": word not in PUBLISHED
            and any(part in HEAD_KINDS for part in (first, head)),
            f"{program} has no n-gram tables or bigrams": first in ("tables", "static", "maxgram"),
            "prompt lookup comes nearest: fewer drafts, and gamma was not measured for it": nearest,
            f"{program} reads no head from a GGUF file: name the repository that {recipe.drafter} was made of": unread,
            f"the compiled pass over {recipe.compiled} stays here: c and v(n) are others in {program}": recipe.compiled,
        }
    )


def title_of(word: str) -> str:
    """Return the name of a published kind of drafter in messages."""
    return {
        "eagle1": "EAGLE-1 or 2 heads",
        "eagle3": "EAGLE-3 heads",
        "pard": "PARD models",
        "assistant": "Gemma 4 assistants",
    }.get(word, f"{word} heads")


def _gguf(name: str) -> bool:
    return name.endswith(".gguf")


# -- vLLM -------------------------------------------------------------------------------------------


def _vllm(recipe: Recipe, notes: list[str]) -> str:
    if any(map(_gguf, (recipe.target, recipe.drafter))):
        notes += [
            "GGUF files need the package vllm-gguf-plugin, which is experimental; serve the original weights",
            "if you can, else add --tokenizer with the original model's name",
        ]
    config: dict[str, object] = {}
    drafts = {"num_speculative_tokens": recipe.gamma}
    if recipe.word == "model":
        config = {"method": "draft_model", "model": recipe.drafter, **drafts}
        if recipe.translated:
            config["use_heterogeneous_vocab"] = True
            notes.append("vLLM drafts with another vocabulary the shared tokens alone, and greedily")
    elif recipe.word in PUBLISHED and (method := PUBLISHED[recipe.word][0]):
        config = {**method, **({"model": recipe.drafter} if recipe.named else {}), **drafts}
        notes.append("vLLM drafts a chain, no tree")
    elif recipe.word in PUBLISHED:
        notes.append(f"vLLM's methods have no {recipe.word}: without drafts")
    elif recipe.word == "suffix":
        config = {"method": "suffix", **drafts}
        notes.append("it needs the package arctic-inference there, and reads every answer of the server")
    elif recipe.looks_up:
        config = {"method": "ngram", **drafts, "prompt_lookup_max": recipe.lookup, "prompt_lookup_min": 1}
    words = ["vllm", "serve", recipe.target]
    return shlex.join([*words, "--speculative-config", json.dumps(config)] if config else words)


# -- transformers -----------------------------------------------------------------------------------


def _transformers(recipe: Recipe, notes: list[str]) -> str:
    call = ""
    if recipe.word == "mtp":
        call = "use_mtp=True, "
        notes.append("transformers' use_mtp is for DeepSeek V3, GLM-4-MoE and others that its documents name")
    elif recipe.word in PUBLISHED and recipe.word != "assistant":
        notes.append(
            f"transformers reads no {title_of(recipe.word)}: without drafts (its use_mtp is for a model's own layers)"
        )
    if any(map(_gguf, (recipe.target, recipe.drafter))):
        notes.append("GGUF files need the package gguf and are expanded to floats")
    kind = "AutoModelForSeq2SeqLM" if recipe.encodes else "AutoModelForCausalLM"
    lines = [
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({_from(recipe.target)})",
        f"model = {kind}.from_pretrained({_from(recipe.target)})",
    ]
    if recipe.word in ("model", "assistant"):
        call = "assistant_model=assistant, "
        lines += [
            f"assistant = {kind}.from_pretrained({_from(recipe.drafter)})",
            f"assistant.generation_config.num_assistant_tokens = {recipe.gamma}",
            'assistant.generation_config.num_assistant_tokens_schedule = "constant"',
            "assistant.generation_config.assistant_confidence_threshold = 0.0",
        ]
        if recipe.translated:
            lines.append(f"assistant_tokenizer = AutoTokenizer.from_pretrained({_from(recipe.drafter)})")
            call += "tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer, "
    elif recipe.looks_up:
        call = f"prompt_lookup_num_tokens={recipe.gamma}, max_matching_ngram_size={recipe.lookup}, "
    ids = "answer[0]" if recipe.encodes else "answer[0, inputs.input_ids.shape[1] :]"
    inputs = f'tokenizer({json.dumps(PROMPT)}, return_tensors="pt")'
    if recipe.template:
        if own := TEMPLATES.get(recipe.template):
            lines.append(f"tokenizer.chat_template = {own!r}")
        lines.append(f"chat = {json.dumps([{'role': 'user', 'content': PROMPT}])}")
        inputs = (
            'tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")'
        )
    lines += [
        f"inputs = {inputs}",
        f"answer = model.generate(**inputs, {call}max_new_tokens=64, do_sample=False)",
        f"print(tokenizer.decode({ids}))",
    ]
    return "\n".join(lines)


def _from(name: str) -> str:
    """Return the arguments of `from_pretrained` for this model."""
    if not _gguf(name):
        return json.dumps(name)
    file = Path(name)
    return f"{json.dumps(str(file.parent))}, gguf_file={json.dumps(file.name)}"


# -- llama.cpp --------------------------------------------------------------------------------------


def _llama_cpp(recipe: Recipe, notes: list[str]) -> str:
    drafts = [f"--spec-draft-n-max {recipe.gamma}", "--spec-draft-n-min 0", "--spec-draft-p-min 0"]
    words, target = [], _converted(recipe.target, notes)
    if recipe.word == "model":
        notes += ["another vocabulary: llama.cpp translates its drafts as text, or refuses it"] * recipe.translated
        words = ["-md", shlex.quote(_converted(recipe.drafter, notes)), "--spec-type draft-simple", *drafts]
    elif recipe.word in PUBLISHED and (kind := PUBLISHED[recipe.word][1]):
        words = [f"--spec-type {kind}", *drafts]
        if recipe.drafter:
            head = _converted(recipe.drafter, notes, f" --target-model-dir {shlex.quote(recipe.target)}")
            words = ["-md", shlex.quote(head), *words]
    elif recipe.word in PUBLISHED:
        notes.append(f"llama.cpp's --spec-type has no {title_of(recipe.word)}: without drafts")
    elif recipe.looks_up:
        words = [
            "--spec-type ngram-simple",
            f"--spec-ngram-simple-size-n {recipe.lookup} --spec-ngram-simple-size-m {recipe.gamma}",
        ]
    return " ".join(["llama-server", "-m", shlex.quote(target), *words])


def _converted(name: str, notes: list[str], more: str = "") -> str:
    """Return the GGUF file of a model; for another format a note says how it is converted."""
    if _gguf(name):
        return name
    file = f"{Path(name).name}.gguf"
    notes.append(f"first: python convert_hf_to_gguf.py {shlex.quote(name)}{more} --outfile {shlex.quote(file)}")
    return file


# -- SGLang -----------------------------------------------------------------------------------------


def _sglang(recipe: Recipe, notes: list[str]) -> str:
    if _gguf(recipe.target):
        notes.append("SGLang reads few architectures from GGUF files: serve the original weights if you can")
    heads = {word: algorithm for word, (_, _, algorithm) in PUBLISHED.items()}
    algorithm = {"model": "STANDALONE", **heads}.get(recipe.word, "NGRAM" if recipe.looks_up else "")
    if recipe.translated:
        notes.append("SGLang drafts with the target's vocabulary alone: without drafts")
        algorithm = ""
    elif recipe.word in PUBLISHED and not algorithm:
        notes.append(f"SGLang's algorithms have no {title_of(recipe.word)}: without drafts")
    in_steps, sized = algorithm in ("EAGLE", "EAGLE3", "STANDALONE"), algorithm in ("DFLASH", "DSPARK")
    flags = {
        "--model-path": recipe.target,
        "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": recipe.drafter if algorithm and recipe.named else "",
        "--speculative-num-steps": str(recipe.gamma) if in_steps else "",
        "--speculative-eagle-topk": "1" if in_steps else "",
        # A head that drafts a block has its own size.
        "--speculative-num-draft-tokens": str(recipe.gamma + 1) if algorithm and not sized else "",
    }
    given = (word for flag, value in flags.items() if value for word in (flag, value))
    return shlex.join(["python", "-m", "sglang.launch_server", *given])


class Program(NamedTuple):
    """Another program. `command` returns the text to run and adds to the notes; `without_encoders`: a line that says
    that the program takes no encoder-decoder model, "" if it does."""

    name: str
    documents: str
    command: Callable[[Recipe, list[str]], str]
    without_encoders: str = ""


PROGRAMS: Mapping[str, Program] = {
    "vllm": Program("vLLM", "vLLM (documents of commit 01ed47b)", _vllm, "vLLM drafts for no encoder-decoder model"),
    "sglang": Program(
        "SGLang", "SGLang (documents of commit fc6d465)", _sglang, "SGLang serves no encoder-decoder model"
    ),
    "transformers": Program("transformers", "transformers 5.23", _transformers),
    "llama.cpp": Program(
        "llama.cpp",
        "llama.cpp (builds that have --spec-draft-n-max)",
        _llama_cpp,
        "llama-server serves no encoder-decoder model",
    ),
}


# -- the flags of `check` ---------------------------------------------------------------------------

_HUGE = Number(0, 1e30, without_low=True)

PLAN_FIELDS = by_name(
    Field("methods", METHOD_NAMES, ("spec",), "drafters of the pair to measure, as the lanes of bench"),
    Field("c", NumberList(0, 1000), (), "use these costs of a drafted token, in one-token passes of the target"),
    Field("target_params", _HUGE, None, "describe a target that is not loaded: its parameters"),
    Field("target_bytes", _HUGE, 2.0, "bytes of one of them"),
    Field("drafter_params", NumberList(0, 1e15, without_low=True), (), "parameters of the drafters to it"),
    Field("bandwidth", _HUGE, None, "bytes that the described machine reads a second"),
    Field("flops", _HUGE, None, "operations a second of that machine (default: no limit)"),
    Field("gammas", WholeList(1, 64), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), "rows of the plan"),
    Field("alphas", NumberList(0, 1), (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "columns of the plan"),
    Field("json", SWITCH, False, "with --plan: every figure, as one JSON object"),
)
CHECK_FIELDS: Mapping[str, Field] = {
    "for": Field("for", Choice(tuple(PROGRAMS)), None, "also predict, and print the command for another program"),
    "speed": Field("speed", SWITCH, False, "also time passes over 1 to 16 tokens"),
    "plan": Field("plan", SWITCH, False, "instead: the speed-up to expect over gamma and alpha"),
    **PLAN_FIELDS,
}


def check_args(given: SettingValues, words: Sequence[str] = ()) -> Namespace:
    """Return the values. `program`: the program whose command to print, or None; `forecast`: whether to predict the
    pair's speed; `plan`: whether to print the speed-up over gamma and alpha; `c` replaces every other cost of drafting.

    UsageError, in one line, for flags of --plan that exclude each other or are given without --plan.
    """
    args = arguments(CHECK_FIELDS, given)
    args.program = vars(args).pop("for")
    args.forecast = args.program is not None or len(given.get("name") or ()) == 2
    flags = {name: field.flag for name, field in PLAN_FIELDS.items() if name in given}
    described = args.target_params is not None
    raise_first(
        {
            **{f"{flag} belongs to --plan: give that too": not args.plan for flag in flags.values()},
            "--plan is a table by itself: leave --for and --speed out": args.plan and (args.program or args.speed),
            **{
                f"{flags[name]} describes hardware or drafters of --target-params: give that too": not described
                for name in ("drafter_params", "target_bytes", "bandwidth", "flops")
                if name in flags
            },
            "--target-params needs --bandwidth: bytes that the machine reads a second, such as 3.35e12": (
                described and args.bandwidth is None
            ),
            "--target-params needs --drafter-params or --c: what the drafters are": (
                described and not (args.drafter_params or args.c)
            ),
            "--c and --drafter-params contradict each other: give one": described and args.c and args.drafter_params,
        }
    )
    return args
