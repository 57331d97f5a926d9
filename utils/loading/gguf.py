"""GGUF file → a folder that loads in a second: float32 safetensors, tokenizer, configurations.

Conversion runs once, in a process of its own: it can be stopped at once, its memory is given back,
and nothing a library writes reaches the screen. `python -m utils.loading.gguf FILE FOLDER` is that
process; it reports one JSON object a line. Knows nothing of catalogues and packages.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from utils.child import run_child
from utils.errors import UserError
from utils.gguf.facts import complete, end_ids, read_header
from utils.loading.cache import cache_folder, is_whole, locked, publish, scratch, writing
from utils.progress import Progress

FORMAT = 2  # raised whenever the same file would be converted differently

# Shares of the time, measured on the default model: reading the header, the tensors, tokenizer and saving.
_HEADER, _TENSORS, _TOKENIZER = 0.5, 0.75, 0.9

# Vocabularies that split off every digit before anything else; transformers leaves this out for GGUF files.
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def converted(
    source: Path, digest: str, progress: Progress, cancelled: Callable[[], bool], *, thorough: bool = False
) -> Path:
    """The converted folder of the GGUF file `source` with sha256 `digest`; made if missing or damaged.

    Raises UserError if the file cannot be converted, Cancelled when stopped.
    """
    entry, made_from = converted_entry(digest)
    if is_whole(entry, made_from, thorough=thorough):
        return entry
    with locked(entry, progress, cancelled):
        if is_whole(entry, made_from, thorough=thorough):  # another process was faster
            return entry
        with scratch(entry) as folder:
            _convert(source, folder, progress, cancelled)
            publish(folder, entry, made_from)
    return entry


def converted_entry(digest: str) -> tuple[Path, dict[str, object]]:
    """Where the conversion of the file with this sha256 lies, and what its manifest must say."""
    return cache_folder() / "converted" / digest[:16], {"sha256": digest, "format": FORMAT}


def _convert(source: Path, folder: Path, progress: Progress, cancelled: Callable[[], bool]) -> None:
    stage = f"converting {source.name}"
    reported: dict[str, Any] = {}

    def read(line: str) -> None:
        with contextlib.suppress(ValueError):
            reported.update(json.loads(line))

    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    status, said = run_child(
        [sys.executable, "-m", "utils.loading.gguf", str(source.resolve()), str(folder)],
        env=env,
        on_line=read,
        on_tick=lambda: progress(stage, reported.get("fraction")),
        cancelled=cancelled,
    )
    if "errno" in reported:
        with writing(folder.parent):
            raise OSError(reported["errno"], reported["error"])
    if status:
        last = said.strip().splitlines()[-1:] or [f"the converter ended with status {status}"]
        hint = ": out of memory?" if status == -9 else ""
        raise UserError(f"cannot convert {source.name}: {str(reported.get('error', last[0]))[:200]}{hint}")
    progress(stage, 1.0)


def main(source: Path, folder: Path) -> int:
    """The converter process: writes `folder`, reports on stdout, 0 if all went well."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no report

    def report(**what: object) -> None:
        reports.write(json.dumps(what) + "\n")

    try:
        write_folder(source, folder, lambda fraction: report(fraction=round(fraction, 3)))
        return 0
    except Exception as error:  # whatever it is, it ends this process and is told in one line
        number = {"errno": error.errno} if isinstance(error, OSError) and error.errno else {}
        report(error=" ".join(str(error).split()) or type(error).__name__, **number)
        return 1


def write_folder(source: Path, folder: Path, report: Callable[[float], None]) -> None:
    """Convert `source` into `folder` in this process; `report` gets the fraction done."""
    import gguf
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils as legacy

    _watch(gguf, legacy, source, report)
    header = read_header(source)
    config = transformers.AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    complete(config, header)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        config=config,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.hf_quantizer = None  # type: ignore[assignment]  # else it refuses to be saved
    vars(model.config).pop("quantization_config", None)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = end_ids(header)
    report(_TENSORS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    _mend_tokenizer(tokenizer, source, model.config)
    tokenizer.save_pretrained(str(folder))
    report(_TOKENIZER)
    model.save_pretrained(str(folder))
    report(1.0)


def _mend_tokenizer(tokenizer: Any, source: Path, config: Any) -> None:
    """What transformers leaves out when it builds a tokenizer from a GGUF file."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import get_gguf_tokenizer

    _, described, _ = get_gguf_tokenizer(str(source))
    if described.get("pre_tokenizer_type") in _DIGITS_APART:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.init_kwargs["model_max_length"] = config.max_position_embeddings
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)


def _watch(gguf: Any, legacy: Any, source: Path, report: Callable[[float], None]) -> None:
    """Have transformers' loader report, and spare it most of its work: 10 s instead of 25 s.

    It parses the file once for the configuration and once for the tensors, each time with every
    token and merge as a Python object (the tokenizer is read by other code), and builds the table
    of tensor names anew for every module. None of this changes the result.
    """
    import numpy as np
    from transformers.integrations.gguf.reader import GgufHeader

    try:
        end = GgufHeader.from_file(str(source)).data_start
    except (ValueError, KeyError, IndexError):  # a type its newer reader does not know: no fractions then
        end = source.stat().st_size

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        seen = 0

        def _get_str(self, offset: int) -> Any:
            if offset > self.seen + end // 64:
                self.seen = offset
                report(min(_HEADER, _HEADER * offset / end))
            return super()._get_str(offset)

        def __init__(self, path: Any, *rest: Any, **named: Any) -> None:
            super().__init__(path, *rest, **named)
            tokens = self.fields.pop("tokenizer.ggml.tokens", None)
            for name in ("merges", "scores", "token_type"):
                self.fields.pop(f"tokenizer.ggml.{name}", None)
            size = f"{self.fields['general.architecture'].contents()}.vocab_size"
            if tokens is not None and size not in self.fields:
                count = np.array([len(tokens.data)], dtype=np.uint32)
                kinds = [gguf.GGUFValueType.UINT32]
                self.fields[size] = gguf.ReaderField(0, size, [count], [0], kinds)

    def bar(items: Iterable[Any], **_named: Any) -> Iterator[Any]:
        held = list(items)
        for done, item in enumerate(held):
            report(_HEADER + (_TENSORS - _HEADER) * done / len(held))
            yield item

    gguf.GGUFReader = functools.cache(Reader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)  # else built anew for every module
    legacy.tqdm = bar


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
