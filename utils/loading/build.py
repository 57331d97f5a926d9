"""A folder → a model and its tokenizer on a device, quantized or packed. Imports transformers only if it must."""

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.catalogue.specs import ModelSpec
from utils.catalogue.templates import end_ids
from utils.device_map import Graphs, device_map, room_of
from utils.errors import UnfitError, UsageError, UserError, holding
from utils.families import facts_of
from utils.files import read_object
from utils.kernels.build import why_not
from utils.kernels.quantized_linear import FLOAT_KINDS, KINDS, QuantizedLinear, narrow_activations, pack, quantize
from utils.loading.cache import check_memory
from utils.loading.completeness import check_loaded, check_written
from utils.loading.loaded import UNSAID, LoadedModel, LoadOptions, LoadPlan, context_of
from utils.loading.packed_gguf import (
    ONE_AT_A_TIME,
    config_in,
    entry_of,
    make_kernels,
    packed_model,
    packed_weights,
)
from utils.loading.quiet import quiet_libraries, quiet_warnings
from utils.loading.sources import model_folder, weight_files
from utils.objects import HfConfig, HfModel, HfTokenizer, Json
from utils.processes import barrier
from utils.progress import SILENT, Progress
from utils.tokenizer import BOS_BEFORE_CHAT, PIECE_FILES, file_tokenizer, sentence_pieces, splitting_so

QUANTIZATIONS = ("none", *KINDS, "int8", "nf4", "fp4")  # the last three by bitsandbytes
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


LoadStep = tuple[str, Callable[[HfModel], object]]  # the stage to report, and a change of the model


def load_model(
    spec: ModelSpec,
    folder: Path,
    options: LoadOptions,
    device: str,
    quantization: str,
    progress: Progress = SILENT,
) -> LoadedModel:
    """Build the model in `folder`, causal or encoder-decoder, on `device`.

    The `folder` of a GGUF file may have only the configuration: its weights are expanded if they cannot stay as they
    are. float32 models on the CPU get their weights packed; with several processes (`options.tp_size`) each loads
    its part, unpacked. Raises UserError in one line, Cancelled when stopped.
    """
    started, chosen = time.perf_counter(), pick_device(device)
    if options.graphs and chosen.type != "cuda" and options.drafter_device is None:
        raise UserError(f"--graphs replays passes on an NVIDIA GPU, {spec.name} runs on {chosen.type}")
    progress(f"loading {spec.name}")
    with quiet_warnings(), _in_one_line(spec.name, folder, chosen):
        plan, build, steps = work_of(spec, folder, options, device, quantization, progress)
        model = build()
        for stage, step in steps:
            progress(stage)
            step(model)
        progress.check()
    model.kv_dtype = _DTYPES.get(options.kv_dtype, torch.float32 if plan.quantization == "none" else None)
    narrow_activations(model, options.activations == "q8")
    return LoadedModel(
        **vars(plan),
        model=model,
        parameters=model.counted,
        activations=(
            "" if all(each.kind in FLOAT_KINDS.values() for each in packed_weights(model)) else options.activations
        ),
        bytes=held_bytes(model) + sum(weight.data.nbytes for weight in packed_weights(model)),
        seconds=time.perf_counter() - started,
        own_head=model.own_head,
    )


def work_of(
    spec: ModelSpec, folder: Path, options: LoadOptions, device: str, quantization: str, progress: Progress
) -> tuple[LoadPlan, Callable[[], HfModel], Sequence[LoadStep]]:
    """Return how the model in `folder` is loaded, the function that builds it, and the steps after that. A GGUF file is
    packed or expanded here: only then is it known whether its bits can be kept. Raises as :func:`load_model`."""
    chosen, kind = pick_device(device), spec.quantization if quantization == "auto" else quantization
    wanted, why = options.dtype if options.dtype != "auto" else spec.dtype, ""
    attention = options.attn_implementation or spec.attn_implementation
    if spec.of_gguf:
        as_is = quantization == "auto" and kind in UNSAID and not attention and options.tp_size == 1
        if (
            as_is
            and (chosen.type, pick_dtype(wanted, chosen, None)) == ("cpu", torch.float32)
            and (own := config_in(folder)) is not None
        ):
            try:
                entry = entry_of(spec, own, options, progress)
                build = partial(packed_model, own, entry, folder, spec.name)
                bits = str(read_object(entry / "index.json")["type"])
                return _planned(spec.name, own, chosen, torch.float32, bits, stored="GGUF"), build, ()
            except UnfitError as error:
                why = str(error)
        folder = model_folder(spec, options, progress)
    config, family = _config_of(spec.name, folder, options)
    dtype, size = pick_dtype(wanted, chosen, config.dtype), _weights(folder)
    quantized = quantization_config(kind, chosen, dtype)
    spread = None
    if device == "auto" and options.tp_size == 1 and not config.is_encoder_decoder and kind not in KINDS:
        room = room_of(chosen)
        if size * dtype.itemsize / (config.dtype or dtype).itemsize > next(iter(room.values())):
            with ONE_AT_A_TIME:
                spread = device_map(spec.name, family, config, dtype, kind, room, options.trust_remote_code)
    whole = quantized is None and spread is None and options.tp_size == 1  # this process moves all of it to one device
    packs = whole and chosen.type == "cpu" and dtype == torch.float32  # its layers are packed for the kernels
    unfit = _unfit(config, attention, progress) if packs else ""
    tables = packs and not unfit  # a compiled pass runs it
    kept = config.dtype if tables and config.dtype in FLOAT_KINDS else dtype  # weights keep their size
    if whole and chosen.type == "cpu":
        what, instead = str(kept).removeprefix("torch."), "try --quantization nf4, --dtype bfloat16 or a smaller model"
        check_memory(f"{spec.name} in {what}", size * kept.itemsize / (config.dtype or kept).itemsize, instead)
    arguments = {
        "attn_implementation": attention,
        "quantization_config": quantized,
        "device_map": {"": str(chosen)} if spread is None and quantized is not None else spread,
        **sharing(spec.name, config, kind, options.tp_size),
    }
    given = {name: value for name, value in arguments.items() if value is not None} | {"dtype": kept, "config": config}
    moved_to, captures = chosen if whole else None, options.graphs and chosen.type == "cuda" and spread is None
    build = partial(_built, spec.name, folder, options, family, given, moved_to, captures, progress)
    converts = {
        f"expanded to {str(kept).removeprefix('torch.')}": spec.of_gguf,
        f"quantized to {kind}": quantized is not None,
        f"rounded to {kind}": kind in KINDS,
        "packed": packs,
    }
    plan = _planned(
        *(spec.name, config, chosen, dtype, kind),
        stored="GGUF" if spec.of_gguf else str(config.dtype or dtype),
        converts=tuple(holding(converts)),
        expanded=why or unfit,
    )
    return plan, build, _steps(spec.name, kind, packs, tables)


def _planned(
    name: str,
    config: HfConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    stored: str,
    converts: tuple[str, ...] = (),
    expanded: str = "",
) -> LoadPlan:
    return LoadPlan(
        name=name,
        device=device,
        dtype=dtype,
        quantization=quantization,
        context=context_of(config.get_text_config(decoder=True)),
        vocab_size=config.get_text_config().vocab_size,
        encodes=bool(config.is_encoder_decoder),
        stored=stored,
        converts=converts,
        expanded=expanded,
    )


def _steps(name: str, kind: str, packs: bool, tables: bool) -> Sequence[LoadStep]:
    """Return the changes of a built model: its weights rounded to `kind`, the others packed as they are."""
    rounds: list[LoadStep] = [(f"rounding {name} to {kind}", partial(quantize, kind=kind, tables=tables))]
    acts = partial(pack, tables=tables), nn.Module.float, hide_weights  # other parts compute in float32
    return [*(rounds if kind in KINDS else ()), *((f"packing {name}", act) for act in acts if packs)]


def _config_of(name: str, folder: Path, options: LoadOptions) -> tuple[HfConfig, HfModel]:
    """Return the configuration of the model in `folder`, and transformers' class of such models. UserError for a
    configuration that lacks something."""
    quiet_libraries()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    stored = read_object(folder / "config.json")
    if (ends := folder / "generation_config.json").is_file():
        read_object(ends)  # UserError for a broken one, which transformers ignores with its eos ids
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=options.trust_remote_code)
    check_written(name, stored, config)
    if config.model_type.endswith("_assistant"):
        admit_readers(type(config.get_text_config()))
    return config, AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _unfit(config: HfConfig, attention: str | None, progress: Progress) -> str:
    """Return why no compiled pass runs a model (utils/kernels/pass.c, one call for all layers); "" if one does."""
    try:
        make_kernels(progress)
        facts = None if attention else facts_of(config)
    except UnfitError as error:
        return str(error)
    return "" if facts else f"attn_implementation {attention} asks for transformers' own pass"


def _built(
    name: str,
    folder: Path,
    options: LoadOptions,
    family: HfModel,
    given: Json,
    device: torch.device | None,
    captures: bool,
    progress: Progress,
) -> HfModel:
    """Return transformers' model, every tensor of which was read, moved to `device` where that is given. Sets
    `counted`, its number of parameters, and `own_head`: its head differs from the embedding that config.json ties it
    to."""
    with ONE_AT_A_TIME:
        progress.check()
        model, reported = family.from_pretrained(
            str(folder),
            trust_remote_code=options.trust_remote_code,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # else transformers reports them in many lines
            output_loading_info=True,
            **given,
        )
    config = given["config"]
    check_loaded(name, reported, config=config)
    if hasattr(config, "quantization_config") and getattr(model, "hf_quantizer", None) is None:
        raise UserError(f"{name} is quantized in a way that transformers does not know and would leave out")
    tied = bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))
    heads = [model.get_output_embeddings(), model.get_input_embeddings()]
    model.own_head = tied and None not in heads and heads[0].weight is not heads[1].weight
    progress.check()
    if options.tp_size > 1:
        barrier("loaded")
    model.eval().requires_grad_(False)
    if captures:
        model.capture = Graphs()
    if device is not None:
        model.to(device)
    model.counted = model.num_parameters()
    return model


def admit_readers(kind: HfConfig) -> None:
    """Let transformers 5.23 build a model all of whose layers read another model's keys: it refuses one without a layer
    that stores keys."""
    own = kind.kv_sharing_modes.fget
    if own.__module__ != __name__:

        def modes(config: HfConfig) -> list[str | None]:
            stores = config.num_kv_shared_layers < config.num_hidden_layers
            return own(config) if stores else ["reuse"] * config.num_hidden_layers

        kind.kv_sharing_modes = property(modes)


def _weights(folder: Path) -> int:
    """Return the bytes of the weight files in `folder`."""
    return sum(file.stat().st_size for file in weight_files(folder))


@contextmanager
def _in_one_line(name: str, folder: Path, chosen: torch.device) -> Iterator[None]:
    """Turn errors of building a model into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        why = f"cannot load {name} from {folder}: {text[:200] or type(error).__name__}"
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text:
            left, total = torch.cuda.mem_get_info(chosen) if chosen.type == "cuda" else (0, 0)
            free = f", {left / 1e9:.1f} of {total / 1e9:.1f} GB free on {chosen}" if total else ""
            why = (
                f"out of memory loading {name} ({_weights(folder) / 1e9:.1f} GB of weights{free}): "
                "try --quantization nf4 or a smaller model"
            )
        elif "trust_remote_code" in text:
            why = f"{name} needs its own code: allow it with --trust-remote-code"
        raise UserError(why) from error


def load_tokenizer(folder: Path, options: LoadOptions) -> HfTokenizer | None:
    """Return the tokenizer in `folder`; None if no tokenizer files lie there. Raises UserError if they are broken."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "source.spm", *PIECE_FILES)
    if not any((folder / name).is_file() for name in names):
        return None

    stored = folder / "tokenizer_config.json"
    of_gguf = stored.is_file() and BOS_BEFORE_CHAT in read_object(stored)  # "auto" is another class for some models

    def whole(kind: str = "PreTrainedTokenizerFast" if of_gguf else "AutoTokenizer") -> HfTokenizer:
        quiet_libraries()
        import transformers

        with quiet_warnings():
            return getattr(transformers, kind).from_pretrained(
                str(folder), trust_remote_code=options.trust_remote_code, local_files_only=True
            )

    try:
        pieces = None if options.trust_remote_code else sentence_pieces(folder)
        if pieces is not None:
            return splitting_so(
                pieces, [partial(whole, kind) for kind in ("AutoTokenizer", "LlamaTokenizer", "T5Tokenizer")]
            )
        return file_tokenizer(folder, whole) or whole()
    except Exception as error:  # the libraries raise many errors; all become one line
        raise UserError(f"cannot load the tokenizer in {folder}: {' '.join(str(error).split())[:200]}") from error


def stop_ids(model: HfModel, tokenizer: HfTokenizer) -> frozenset[int]:
    """Return all ids that end an answer: the generation configuration's, the model's, the tokenizer's and its
    template's. UserError for one that is no id.
    """
    named = [getattr(config, "eos_token_id", None) for config in (model.generation_config, model.config, tokenizer)]
    ends = frozenset(chain(*(ids if isinstance(ids, list | tuple) else [ids] for ids in named if ids is not None)))
    if others := [end for end in ends if not isinstance(end, int)]:
        raise UserError(f"eos_token_id is {others[0]!r}, not the id of a token")
    return ends | end_ids(tokenizer)


def pick_device(name: str) -> torch.device:
    """ "auto" is cuda, else mps, else cpu. Raises UsageError for a device this machine does not have."""
    have = holding({"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True})
    if name == "auto":
        return torch.device(have[0])
    kind = name.partition(":")[0]
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if kind not in have or name not in (kind, *(f"{kind}:{number}" for number in range(count))):
        raise UsageError(f"device '{name}' is not there: this machine has {', '.join(have)}")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, own: torch.dtype | None) -> torch.dtype:
    """Return the dtype `name`; "auto" is float32 on the CPU, float16 on mps, on CUDA the model's `own` if that has 16
    bits, else bfloat16 if the GPU has it, else float16. UsageError for another name."""
    if name not in ("auto", *_DTYPES):
        raise UsageError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got '{name}'")
    if known := _DTYPES.get(name) or {"cpu": torch.float32, "mps": torch.float16}.get(device.type):
        return known
    if own in (torch.float16, torch.bfloat16):
        return own
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def sharing(name: str, config: HfConfig, kind: str, count: int) -> Json:
    """Return the arguments of `from_pretrained` that split a target among `count` processes; {} for one.

    UsageError, with the reason, if they cannot share it.
    """
    if count == 1:
        return {}
    text = config.get_text_config()
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    whys = holding(
        {
            f"quantization {kind} goes with one process": kind not in UNSAID,
            "it is an encoder-decoder model": config.is_encoder_decoder,
            f"transformers has no tensor-parallel plan for {text.model_type}": not getattr(
                text, "base_model_tp_plan", None
            ),
            f"its {heads} attention heads and {keys} key/value heads do not divide by {count}": heads % count
            or keys % count,
        }
    )
    if whys:
        common = math.gcd(heads, keys)
        counts = ", ".join(str(n) for n in range(2, common + 1) if common % n == 0)
        can = f" ({counts} can)" if counts and "divide" in whys[0] else ""
        raise UsageError(f"{count} processes cannot share {name}: {whys[0]}{can}")
    from transformers.distributed.configuration_utils import DistributedConfig

    barrier("loading")
    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=count)}


# -- 4 and 8 bit weights: q4 and q8 by our kernels on the CPU, the others by bitsandbytes on CPU and CUDA ---------


def quantization_config(kind: str, device: torch.device, dtype: torch.dtype) -> HfConfig | None:
    """Return the transformers configuration for `kind`; None for "none" and for our kernels. 4 bit computes in `dtype`.

    Raises UsageError for an impossible kind or device, UserError without the kernels or bitsandbytes.
    """
    if kind not in QUANTIZATIONS:
        raise UsageError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got '{kind}'")
    if kind in KINDS:
        if device.type != "cpu" or dtype != torch.float32:
            raise UsageError(
                f"quantization {kind} computes in float32 on the cpu, got {str(dtype).removeprefix('torch.')} on "
                f"{device.type}"
            )
        if why := why_not():
            raise UserError(f"quantization {kind} has no kernels here ({why}): use --quantization none")
    if kind in ("none", *KINDS):
        return None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"quantization {kind} runs on cpu and cuda, not on {device.type}: use --quantization none")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {kind} needs the package bitsandbytes: install it, or use --quantization none")
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)


def held_bytes(model: nn.Module) -> int:
    """Return bytes of all parameters and buffers, with the scales of 4-bit weights; of a tensor that several processes
    share, those of this process's part."""
    states = [weight.quant_state for weight in model.parameters() if hasattr(weight, "quant_state")]
    parts = chain(model.parameters(), model.buffers(), *(state.as_dict().values() for state in states))
    local = (part.to_local() if hasattr(part, "to_local") else part for part in parts if isinstance(part, Tensor))
    return sum(tensor.nbytes for tensor in local)


def hide_weights(model: nn.Module) -> None:
    """Hide the packed weights of the feed-forward layers of T5 and its relatives: these compare the weight's dtype with
    the input's, which would unpack the weight in every pass."""
    for name, part in model.named_modules():
        if name.endswith(".wo") and isinstance(part, QuantizedLinear):
            part.hides_weight = True
