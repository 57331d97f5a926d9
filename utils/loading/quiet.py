"""Silences the libraries' messages to developers, each by its own switch; errors still arrive as exceptions."""

import logging
import os
import warnings

_SWITCHES = {
    "TOKENIZERS_PARALLELISM": "false",  # else it warns after every fork
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

_NOISE = (
    r".*inputs will be cast from.*",  # bitsandbytes, once a layer and call
    r".*`torch_dtype` is deprecated.*",
    r".*copying from a non-meta parameter.*",
    r".*The given NumPy array is not writable.*",
    r".*_check_is_size will be removed.*",
)

_LOGGERS = ("transformers", "huggingface_hub", "bitsandbytes", "accelerate", "gguf", "filelock", "urllib3", "httpx")


def quiet_environment() -> None:
    """Set the switches that are read at import time (values of the user are kept) and silence what needs no import."""
    os.environ.update({**_SWITCHES, **os.environ})
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)


def quiet_libraries() -> None:
    """Silence warnings and progress bars of the model libraries; imports transformers."""
    quiet_environment()
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


def quiet_warnings() -> "warnings.catch_warnings[None]":
    """Return a context in which no Python warning is shown."""
    return warnings.catch_warnings(action="ignore")
