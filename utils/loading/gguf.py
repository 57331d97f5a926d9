"""GGUF file → a folder that loads in a second: tokenizer, configurations and, on request, float32 safetensors.

Weights are expanded for a `--quantization` other than auto, and if no kernel computes with the file's bits. Conversion
runs once, in a separate process: it can be stopped at once, its memory is freed, and the libraries' messages do not
reach the screen.
`python -m utils.loading.gguf FILE FOLDER WEIGHTS` is that process (WEIGHTS: 1 with, 0 without); it reports one JSON
object a line. Knows nothing of catalogues and packages.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from utils.errors import UnfitError, UserError
from utils.files import write_json
from utils.gguf.facts import check_said, complete, teach_families
from utils.gguf.header import ARCHITECTURES, HEAD, TABLE, GgufHeader, module_name, read_header, write_joined
from utils.gguf.vocabulary import end_ids, tokenizer_of
from utils.loading.cache import (
    cache_folder,
    check_disk,
    check_memory,
    filled,
    is_whole,
    remembered_sha256,
    writing,
)
from utils.loading.completeness import check_loaded, check_tensors
from utils.objects import HfConfig, HfModel, Json
from utils.progress import SILENT, Progress, run_child

FORMAT = 6  # raised whenever a file is converted differently


def gguf_digest(file: Path, progress: Progress = SILENT) -> str:
    """Return the sha256 of a GGUF file; of a split one that of its parts' digests."""
    digests = [remembered_sha256(part, progress) for part in read_header(file).parts]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def converted(
    source: Callable[[], Path],
    digest: str,
    progress: Progress = SILENT,
    *,
    weights: bool = True,
) -> Path:
    """Return the converted folder of the GGUF file with sha256 `digest`, created from `source` if missing or damaged.

    Without `weights` tokenizer and configurations are enough. Raises UserError if the file cannot be converted,
    Cancelled when stopped.
    """

    def fill(folder: Path) -> None:
        file = source()
        if weights and not (header := read_header(file)).head:
            what = f"expanding {file.name} to float32"
            joined = sum(part.stat().st_size for part in header.parts) if len(header.parts) > 1 else 0
            expanded = 4 * sum(prod(tensor.shape) for tensor in header.tensors)  # bytes
            check_memory(what, 2 * expanded, "leave out --quantization none, or take a smaller model")
            check_disk(what, expanded + joined, folder)
        _convert(file, folder, weights, progress)

    entries = converted_entries(digest, weights)
    entry, origin = next((entry for entry in entries if is_whole(*entry)), entries[-1])
    return filled(entry, origin, fill, progress)


def converted_entries(digest: str, weights: bool) -> list[tuple[Path, dict[str, object]]]:
    """Return the cache entries that serve for the file with this sha256, and the source in their manifests."""
    return [
        (cache_folder() / name / digest[:16], {"sha256": digest, "format": FORMAT})
        for name in ("converted", "described")[: 2 - weights]
    ]


def _convert(source: Path, folder: Path, weights: bool, progress: Progress) -> None:
    stage = f"{'converting' if weights else 'reading the header of'} {source.name}"
    reported: Json = {}

    def read(line: str) -> None:
        with contextlib.suppress(ValueError):
            reported.update(json.loads(line))

    root = Path(__file__).resolve().parents[2]
    status, errors = run_child(
        [sys.executable, "-m", "utils.loading.gguf", str(source.resolve()), str(folder), str(int(weights))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        on_line=read,
        on_tick=lambda: progress(stage, reported.get("fraction")),
    )
    if "errno" in reported:
        with writing(folder.parent):
            raise OSError(reported["errno"], reported["error"])
    if "refused" in reported:
        raise UserError(reported["refused"])
    if status:
        last = errors.strip().splitlines()[-1:] or [f"the converter ended with status {status}"]
        hint = ": out of memory?" if status == -9 else ""
        raise UserError(f"cannot convert {source.name}: {str(reported.get('error', last[0]))[:200]}{hint}")
    progress(stage, 1.0)


def main(source: Path, folder: Path, weights: bool) -> int:
    """Run the converter process: write `folder` and report on stdout; return 0 if all went well."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stderr

    def report(**what: object) -> None:
        reports.write(json.dumps(what) + "\n")

    try:
        write_folder(source, folder, lambda fraction: report(fraction=round(fraction, 3)), weights=weights)
        return 0
    except UserError as error:
        report(refused=str(error))
    except Exception as error:  # any error ends this process with one line
        report(
            error=" ".join(str(error).split()) or type(error).__name__,
            **{"errno": error.errno} if isinstance(error, OSError) and error.errno else {},
        )
    return 1


def write_folder(source: Path, folder: Path, report: Callable[[float], None], *, weights: bool = True) -> None:
    """Convert `source` into `folder` in this process; `report` gets the fraction done. Without `weights` its steps are
    the imports, the configuration, the tokenizer and the files, by the time that they usually take. UserError for a
    file that cannot be converted."""
    import gguf
    import transformers
    from transformers import modeling_gguf_pytorch_utils as legacy

    step = (lambda done: None) if weights else report
    step(0.15)
    if (header := read_header(source)).head:
        from utils.gguf.heads import write_head

        (_write_layer if header.head == "mtp" else write_head)(header, folder)
        return
    teach_families()
    check_said(header, source.name)
    name, source = source.name, _whole(header, folder, weights)
    names = _watch(gguf, legacy, report)
    config: HfConfig = transformers.AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    step(0.8)
    if config.model_type == "llama" and header.get("expert_count"):
        config = transformers.MixtralConfig(
            **{key: value for key, value in config.to_dict().items() if key != "model_type"}
        )
    try:
        complete(config, header)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    model = _expanded(name, source, header, config, names) if weights else _described(name, header, config)
    vars(model.config).pop("quantization_config", None)
    model.generation_config.eos_token_id = end_ids(header)
    step(0.95)
    tokenizer_of(source, header, model.config.max_position_embeddings).save_pretrained(str(folder))
    for part in (model,) if weights else (model.config, model.generation_config):
        part.save_pretrained(str(folder))
    if weights:
        _save_next_token_layer(header, model.config.num_hidden_layers, folder)
    if source.parent == folder:
        source.unlink()


def _expanded(name: str, source: Path, header: GgufHeader, config: HfConfig, names: Mapping[str, str]) -> HfModel:
    """Return the file's model in float32, every tensor of which was read. `names`: see :func:`_unread`."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    load: Any = AutoModelForCausalLM.from_pretrained
    model, reported = load(
        str(source.parent),
        gguf_file=source.name,
        config=config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        ignore_mismatched_sizes=True,  # else transformers reports them in many lines
        output_loading_info=True,
    )
    check_loaded(name, reported, _unread(header, names))
    model.hf_quantizer = None
    return model


def _described(name: str, header: GgufHeader, config: HfConfig) -> HfModel:
    """Return the file's model without weights, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: HfModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _check_packable(name, header, model)
    model.config.architectures = [type(model).__name__]
    return model


def _whole(header: GgufHeader, folder: Path, weights: bool) -> Path:
    """Return the file itself, or a split one joined in `folder`; without `weights` the file has a hole for them."""
    if len(header.parts) == 1:
        return header.parts[0]
    with (folder / "joined.gguf").open("wb") as out:
        write_joined(header, out, weights=weights)
    return folder / "joined.gguf"


def _unread(header: GgufHeader, names: Mapping[str, str]) -> set[str]:
    """Return the file's tensors that transformers' loader silently ignores. `names`: its table from the file's names to
    its own; empty for families whose loader reports them itself."""
    ours = {tensor.name for tensor in header.parameters if names}
    ours -= {"output.weight"} if header.architecture == "gpt2" else set()  # read without the table
    return {name for name in ours if name not in names and name.removesuffix(".weight") not in names}


def _check_packable(name: str, header: GgufHeader, model: HfModel) -> None:
    """Raise UserError if a file whose bits may stay as they are has other tensors than `model`; a head, and biases of
    queries, keys and values, are optional."""
    if header.architecture not in ARCHITECTURES:
        return
    try:
        named = [(*module_name(tensor.name, header.architecture), tensor.shape) for tensor in header.parameters]
    except UnfitError:
        return  # it is expanded, and checked then
    have = {f"{name}.{part}": (1, *size) if name.endswith("expert_gate") else size for name, part, size in named}
    needed: dict[str, tuple[int, ...]] = {}
    for key, parameter in model.named_parameters():
        stem, _, own = key.rpartition(".")
        if own == "gate_up_proj":  # experts' gate and up together, which a file stores apart
            count, both, width = parameter.shape
            needed |= {f"{stem}.{part}_proj.weight": (count, both // 2, width) for part in ("gate", "up")}
        else:
            needed[f"{key}.weight" if own == "down_proj" else key] = tuple(parameter.shape)
    needed.pop(f"{HEAD}.weight", None)
    biases = {
        f"{key.removesuffix('.weight')}.bias": shape[:1]
        for key, shape in needed.items()
        if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    known = {**biases, **needed, f"{HEAD}.weight": needed[f"{TABLE}.weight"]}
    other = [(key, shape, known[key]) for key, shape in have.items() if known.get(key, shape) != shape]
    check_tensors(name, needed.keys() - have.keys(), have.keys() - known.keys(), other)


# Parts of a multi-token prediction layer that other layers lack, and Qwen's names of them.
_JOINING = {
    **{"eh_proj": "fc", "shared_head_norm": "norm"},
    **{"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"},
}


def _save_next_token_layer(header: GgufHeader, layers: int, folder: Path) -> None:
    """Write the tensors of the multi-token prediction layer after the `layers` of a Qwen3-Next or Qwen3.5 target, which
    transformers leaves out, in float32 and under the names that Qwen publishes, if the file has one."""
    import torch
    from safetensors.torch import save_file

    tensors: Json = {}
    for info in header.tensors:
        part = info.name.removeprefix(f"blk.{layers}.").removesuffix(".weight")
        if not info.name.startswith(f"blk.{layers}.") or part in ("nextn.embed_tokens", "nextn.shared_head_head"):
            continue
        values = torch.from_numpy(info.floats())
        own = _JOINING.get(part.removeprefix("nextn."))
        name = own or module_name(f"blk.0.{part}.weight", header.architecture)[0].removeprefix("model.")
        if part.endswith("norm"):  # the file stores 1 + w
            values = values - 1
        if part.endswith("_exps"):
            base, _, last = name.rpartition(".")
            tensors |= {f"mtp.{base}.{expert}.{last}.weight": each for expert, each in enumerate(values.unbind())}
        else:
            tensors[f"mtp.{name}.weight"] = values[None] if part == "ffn_gate_inp_shexp" else values
    if tensors:
        save_file(tensors, folder / "mtp.safetensors")


def _write_layer(header: GgufHeader, folder: Path) -> None:
    """Write the multi-token prediction layer of a file that holds nothing else, as llama.cpp's converter writes one
    with --mtp."""
    from utils.kernels.bindings import FLOATS

    name, family = header.parts[0].name, header.architecture
    if family not in ("qwen3next", "qwen35", "qwen35moe"):
        raise UserError(f"{name} holds the next-token layer of a {family} model: Qwen3-Next's and Qwen3.5's are read")
    config = {
        **{"kind": "mtp", "gguf": family, "hidden_size": header.get("embedding_length")},
        "rounded": any(info.kind not in FLOATS for info in header.tensors),
    }
    write_json(folder / "config.json", config)
    _save_next_token_layer(header, header.get("block_count", 0) - header.get("nextn_predict_layers"), folder)


def _watch(gguf: Any, legacy: Any, report: Callable[[float], None]) -> dict[str, str]:
    """Patch transformers' loader to report its progress and to parse each file once.

    The loader parses the file for the configuration and again for the tensors, and builds the table of tensor names for
    every module. Returns its table from the file's names to its own, which the loader will fill.
    """
    known, own = dict[str, str](), legacy.get_gguf_hf_weights_map

    def bar(items: Sequence[object], **_named: object) -> Iterator[object]:
        for done, item in enumerate(items):
            report(0.75 * done / len(items))  # the rest of the time comes after the tensors are read
            yield item

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    legacy.tqdm = bar

    def noted(*args: object, **named: object) -> dict[str, str]:
        names: dict[str, str] = own(*args, **named)
        known.update(names)
        return names

    legacy.get_gguf_hf_weights_map = noted
    return known


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1"))
