"""Loading a pair: the default model and its tokenizer, folders of all dtypes, a change of drafter, and what a user is
told when it fails or is cancelled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from app.lanes.pairing import catalogue_in, with_drafter
from sampling.models.fused import FusedNetwork
from sampling.models.network import network_of
from tests.support.refusals import refused
from tests.support.tiny import tiny_model, tiny_pair
from utils.catalogue.specs import PairSpec, spec_from_argument
from utils.errors import UsageError
from utils.kernels.build import instruction_set
from utils.kernels.quantized_linear import QuantizedLinear
from utils.loading.build import load_model
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_drafter, load_pair
from utils.progress import Cancelled, Progress

ROOT = Path(__file__).parents[3]
CPU = LoadOptions(device="cpu")


@pytest.fixture(scope="module")
def default_pair():
    return load_pair(catalogue_in(ROOT / "models.yaml").pair("smollm2"), CPU)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("tiny"))


def spec_of(tiny, drafter="ngram") -> PairSpec:
    return PairSpec(name="tiny", target=spec_from_argument(str(tiny.target)), drafter=drafter)


def test_the_default_pair_is_the_model_that_the_catalogue_promises(default_pair):
    target = default_pair.target
    assert (target.name, target.parameters) == ("SmolLM2-135M-Instruct", 134_515_008)
    assert (target.context, target.vocab_size, target.dtype) == (8192, 49152, torch.float32)
    assert (default_pair.drafter, default_pair.drafter_word) == (None, "tables+feature")
    assert (default_pair.context, default_pair.vocab_size) == (8192, 49152)
    assert default_pair.stop_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert default_pair.tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"


def test_the_chat_template_survives_with_its_default_system_prompt(default_pair):
    user = [{"role": "user", "content": "Hi"}]
    text = default_pair.tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    text = default_pair.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, *user], tokenize=False
    )
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!  Two  spaces\tand a tab\n\n",
        "Grüße aus München — ça va ? Привет, мир. 你好，世界。こんにちは 안녕하세요 مرحبا",
        "emoji 😀👩‍👩‍👧‍👦🇩🇪 and maths ∑∫√ x² ≤ 10⁻³",
        "def f(x):\n    return {'a': [x, 12345, 0x1F]}  # 2024-05-06\n",
        "[link](http://example.org/?a=1&b=2) <b>bold</b> {{jinja}} \\n",
    ],
)
def test_any_text_survives_a_round_trip_through_the_tokenizer(default_pair, text):
    ids = default_pair.tokenizer(text)["input_ids"]
    assert default_pair.tokenizer.decode(ids) == text
    assert max(ids) < 49152


def test_special_tokens_are_one_id_each_and_digits_stand_alone(default_pair):
    tokenizer = default_pair.tokenizer
    assert tokenizer("<|im_start|>user\n")["input_ids"][0] == 1
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_float32_models_on_the_cpu_are_packed_and_their_memory_counts_it(tiny):
    loaded = load_pair(spec_of(tiny), CPU).target
    layers = [m for m in loaded.model.modules() if isinstance(m, QuantizedLinear)]
    assert bool(layers) == (instruction_set() is not None)
    plain = tiny_model()
    assert loaded.parameters == sum(p.numel() for p in plain.parameters())
    assert loaded.bytes == pytest.approx(
        4 * loaded.parameters + sum(b.numel() * b.element_size() for b in plain.buffers()), abs=1024
    )


SHAPE = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "initializer_range": 0.1}


@pytest.mark.skipif(instruction_set() is None, reason="there are no kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "Qwen3Moe"])
def test_a_folder_runs_in_the_compiled_pass_at_its_own_size(family: str, dtype: torch.dtype, tmp_path: Path):
    """Its logits are those that transformers computes in float32 with the same weights."""
    torch.manual_seed(0)
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if family == "Qwen3Moe" else {}
    config = getattr(transformers, f"{family}Config")(**SHAPE, **more)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).to(dtype).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(spec_from_argument(str(tmp_path)), tmp_path, CPU, "cpu", "none")
    assert (loaded.dtype, loaded.quantization, loaded.expanded) == (torch.float32, "none", "")
    tied = 0 if config.tie_word_embeddings else 90 * 64
    assert loaded.parameters == sum(part.numel() for part in model.parameters())
    assert loaded.bytes < dtype.itemsize * (loaded.parameters + 2 * 6 * 64 + 2 * tied) + 8192
    network, ids = network_of(loaded.model), torch.arange(5, 45)[None]
    assert isinstance(network, FusedNetwork)
    logits = network.forward(ids, ids - 5, None, network.new_cache(1), 40)[0]
    with torch.no_grad():
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
        assert float((logits - plain).abs().max()) < 2e-5
        torch.testing.assert_close(loaded.model(ids).logits, plain, rtol=0, atol=2e-5)


def test_other_dtypes_load_and_stay_as_asked(tiny):
    loaded = load_pair(spec_of(tiny), LoadOptions(device="cpu", dtype="bfloat16")).target
    assert loaded.dtype == torch.bfloat16
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


def test_the_drafter_changes_while_the_target_stays(tiny):
    pair = load_pair(spec_of(tiny), CPU)
    drafted = load_drafter(pair, with_drafter(pair.spec, str(tiny.drafter)), CPU)
    assert drafted.target is pair.target
    assert (drafted.drafter_word, drafted.drafter.name, drafted.notes) == ("model", "drafter", ())
    assert drafted.spec.drafter_name == "drafter"
    back = load_drafter(drafted, with_drafter(drafted.spec, "none"), CPU)
    assert (back.drafter_word, back.drafter) == ("none", None)
    refused(load_drafter, pair, with_drafter(pair.spec, str(tiny.target / "nowhere")), CPU, match="no folder")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (LoadOptions(device="quantum"), r"device 'quantum' is not there: this machine has .*cpu"),
        (LoadOptions(device="cuda:99"), r"device 'cuda:99' is not there"),
        (LoadOptions(device="cpu:00"), r"device 'cpu:00' is not there"),
        (LoadOptions(device="cpu:"), r"device 'cpu:' is not there"),
        (LoadOptions(device="cpu", dtype="float8"), r"dtype must be one of auto, float32, float16, bfloat16, got"),
        (
            LoadOptions(device="cpu", quantization="int3"),
            r"quantization must be one of none, q4, q8, int8, nf4, fp4, got 'int3'",
        ),
    ],
)
def test_an_option_this_machine_cannot_do_is_a_usage_error(tiny, options, told):
    refused(load_pair, spec_of(tiny), options, match=told, kind=UsageError)


def test_a_folder_without_a_model_says_what_is_missing(tmp_path):
    for prepare, told in [
        (lambda: None, "holds no model: config.json is missing"),
        (lambda: (tmp_path / "config.json").write_text("{}"), "holds no model: no \\*.safetensors or \\*.bin file"),
        (lambda: (tmp_path / "model.safetensors").write_bytes(b"x" * 99), "is incomplete or damaged"),
    ]:
        prepare()
        refused(load_pair, PairSpec(name="x", target=spec_from_argument(str(tmp_path))), CPU, match=told)


@pytest.mark.parametrize(
    "last", ["starting the model libraries", "loading target", "packing target", "loading drafter"]
)
def test_cancelling_stops_at_the_next_stage(tiny, last):
    seen: list[str] = []
    with pytest.raises(Cancelled) as raised:
        load_pair(
            spec_of(tiny, spec_from_argument(str(tiny.drafter))),
            CPU,
            Progress(lambda stage, _: seen.append(stage), lambda: seen[-1:] == [last]),
        )
    assert raised.value.exit_code == 130
    assert seen[-1] == last


def test_loading_says_nothing_on_the_terminal(tiny, capfd):
    load_pair(spec_of(tiny, spec_from_argument(str(tiny.drafter))), CPU)
    assert capfd.readouterr() == ("", "")


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own: for settings that libraries read when imported."""
    full = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True, timeout=120)


LOAD_HUB = """
import sys
from utils.catalogue.specs import PairSpec, spec_from_argument
from utils.errors import UserError
from utils.loading.build import load_model
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair
from utils.progress import Progress
for name, offline, revision in LOADS:
    stages = []
    try:
        pair = load_pair(
            PairSpec(name="x", target=spec_from_argument(name)),
            LoadOptions(device="cpu", offline=offline, revision=revision), Progress(lambda *what: stages.append(what)),
        )
        fetched = [fraction for stage, fraction in stages if stage.startswith("fetching")]
        print(pair.target.name, pair.target.parameters, max(fetched, default="cached"))
    except UserError as error:
        print(f"error: {error}")
"""


def load_from_hub(home: Path, endpoint: str, *loads: tuple[str, bool, str | None]) -> list[str]:
    """The lines of loads of a name, offline or not, in a revision, one after the other in one process."""
    done = run(
        LOAD_HUB.replace("LOADS", repr(loads)),
        HF_HOME=str(home),
        HF_ENDPOINT=endpoint,
        HF_HUB_OFFLINE="0",
        SPEC_KERNELS="torch",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()
