"""Settings: ranges, one-line errors, and which layer wins; those of cascades: read, shown, refused, completed, and
taken over from the catalogue.
"""

from pathlib import Path
from typing import Any

import pytest

from app.command_line.arguments import read_request
from app.command_line.main import layers_of
from app.lanes.pairing import catalogue_in, choose_pair
from app.settings.table import FIELDS, SETTING_FIELDS, Layers, ModelOptions, Settings, misspelt_variables, model_options
from app.settings.types import LANES
from tests.app.console.test_completion import offered
from tests.app.console.test_slash_commands import ScriptedConsole, transcript
from tests.support.refusals import refused
from utils.errors import UsageError

NAMES = (
    "cascade must be a comma list of model, plain, glide, feature, eagle, tables, ngram, maxgram or names of the "
    "pair's models, each once, large to small"
)


@pytest.mark.parametrize("name", sorted(SETTING_FIELDS))
def test_every_default_is_read_back_from_the_way_it_is_shown(name: str) -> None:
    field = SETTING_FIELDS[name]
    if field.default != "":
        assert field.read(field.show(field.default)) == field.default


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_value_offered_on_tab_is_accepted(name: str) -> None:
    for choice in FIELDS[name].kind.choices:
        FIELDS[name].read(choice)


A_LIST = f"a comma list of {', '.join(LANES)}, server, URL, each once"
REFUSED: list[tuple[str, Any, str]] = [
    ("top_p", "1.5", "top_p must be above 0 and at most 1, got 1.5 (still 0.9)"),
    ("top_p", "0", "top_p must be above 0 and at most 1, got 0 (still 0.9)"),
    ("top_p", "x", "top_p must be a number above 0 and at most 1, got 'x' (still 0.9)"),
    ("top_p", "nan", "top_p must be a number above 0 and at most 1, got 'nan' (still 0.9)"),
    ("top_p", float("nan"), "top_p must be a number above 0 and at most 1, got nan (still 0.9)"),
    ("temperature", "1e400", "temperature must be from 0 to 5, got 1e400 (still 0)"),
    ("temperature", "inf", "temperature must be a number from 0 to 5, got 'inf' (still 0)"),
    ("temperature", float("inf"), "temperature must be from 0 to 5, got inf (still 0)"),
    ("temperature", 10**400, f"temperature must be from 0 to 5, got 1{'0' * 38}… (still 0)"),
    ("temperature", "-0.1", "temperature must be from 0 to 5, got -0.1 (still 0)"),
    ("temperature", "", "temperature must be a number from 0 to 5, got '' (still 0)"),
    ("temperature", "0,8", "temperature must be a number from 0 to 5, got '0,8' (still 0)"),
    ("temperature", "1_0", "temperature must be a number from 0 to 5, got '1_0' (still 0)"),
    ("temperature", True, "temperature must be a number from 0 to 5, got True (still 0)"),
    ("min_p", "1", "min_p must be at least 0 and below 1, got 1 (still 0)"),
    ("gamma", "x", "gamma must be a whole number from 1 to 64 or auto, got 'x' (still 4)"),
    ("gamma", "Auto", "gamma must be a whole number from 1 to 64 or auto, got 'Auto' (still 4)"),
    ("gamma", "0", "gamma must be a whole number from 1 to 64 or auto, got 0 (still 4)"),
    ("gamma", "65", "gamma must be a whole number from 1 to 64 or auto, got 65 (still 4)"),
    ("gamma", "4.0", "gamma must be a whole number from 1 to 64 or auto, got 4.0 (still 4)"),
    ("gamma", 4.0, "gamma must be a whole number from 1 to 64 or auto, got 4.0 (still 4)"),
    ("gamma", True, "gamma must be a whole number from 1 to 64 or auto, got True (still 4)"),
    ("gamma", "４", "gamma must be a whole number from 1 to 64 or auto, got '４' (still 4)"),
    ("gamma", "٤", "gamma must be a whole number from 1 to 64 or auto, got '٤' (still 4)"),
    ("gamma", "9" * 9000, f"gamma must be a whole number from 1 to 64 or auto, got {'9' * 39}… (still 4)"),
    ("gamma", "4\n5", "gamma must be a whole number from 1 to 64 or auto, got '4\\n5' (still 4)"),
    ("top_k", "-1", "top_k must be a whole number from 0 to 1000000, got -1 (still 0)"),
    ("max_new_tokens", "0", "max_new_tokens must be a whole number from 1 to 1000000, got 0 (still 128)"),
    ("seed", str(2**63), f"seed must be a whole number from 0 to {2**63 - 1} or random, got {2**63} (still 42)"),
    ("seed", "Random", f"seed must be a whole number from 0 to {2**63 - 1} or random, got 'Random' (still 42)"),
    ("verify", "blocks", "verify must be token or block, got 'blocks' (still token)"),
    ("view", "Side", "view must be auto, side, stack or trace, got 'Side' (still auto)"),
    ("chat", "maybe", "chat must be on or off, got 'maybe' (still on)"),
    (
        "compare",
        "",
        f"compare must be {A_LIST}, got '' (still ar,spec)",
    ),
    (
        "compare",
        "ar,ar",
        f"compare must be {A_LIST}, got 'ar,ar' (still ar,spec)",
    ),
    (
        "compare",
        "ar,sp",
        f"compare must be {A_LIST}, got 'ar,sp' (still ar,spec)",
    ),
    (
        "compare",
        "ar,",
        f"compare must be {A_LIST}, got 'ar,' (still ar,spec)",
    ),
    ("system", "\udcff", "system must be text, got '\\udcff' (still (none))"),
    ("tempreature", "1", "unknown setting 'tempreature' (did you mean temperature?)"),
    ("top-p", "1", "unknown setting 'top-p' (did you mean top_p?)"),
    ("zzz", "1", "unknown setting 'zzz'"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED, ids=lambda value: str(value)[:24])
def test_a_refused_value_changes_nothing_and_says_what_holds(name: str, value: Any, message: str) -> None:
    settings = Settings(top_p=0.9)
    assert refused(settings.changed, **{name: value}, kind=UsageError) == message
    assert settings == Settings(top_p=0.9)


ACCEPTED: list[tuple[str, Any, Any]] = [
    ("gamma", "64", 64),
    ("gamma", "+1", 1),
    ("temperature", ".5", 0.5),
    ("temperature", "1e-3", 0.001),
    ("temperature", 1, 1.0),
    ("top_p", "1", 1.0),
    ("min_p", "0", 0.0),
    ("seed", "0", 0),
    ("seed", str(2**63 - 1), 2**63 - 1),
    ("chat", "OFF", False),
    ("chat", "1", True),
    ("compare", "ngram, ar", ("ngram", "ar")),
    ("compare", ["spec"], ("spec",)),
    ("length", "7", 7),
    ("system", "two\nlines", "two\nlines"),
]


@pytest.mark.parametrize(("name", "value", "read"), ACCEPTED)
def test_an_accepted_value_is_read_as_a_plain_one(name: str, value: Any, read: Any) -> None:
    after = Settings().changed(**{name: value})
    found = after.max_new_tokens if name == "length" else getattr(after, name)
    assert found == read
    assert type(found) is type(read)


def test_minus_zero_is_shown_as_zero() -> None:
    assert Settings(temperature="-0.0").show("temperature") == "0"


def test_the_constructor_refuses_too_and_the_record_is_frozen() -> None:
    refused(Settings, gamma=99, match="gamma must be a whole number from 1 to 64 or auto, got 99", kind=UsageError)
    refused(Settings, gama=4, kind=UsageError, match="unknown setting 'gama'")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="frozen"):
        Settings().gamma = 5  # type: ignore[misc]


def test_a_random_seed_is_drawn_once_and_stays() -> None:
    layers = Layers.of(flags={"seed": "random"})
    assert layers.settings.seed == layers.resolve({"gamma": 2}).settings.seed
    assert len({Settings().changed(seed="random").seed for _ in range(8)}) > 1


def test_each_layer_goes_over_the_one_below() -> None:
    pair, environ, flags = {"top_k": 2, "min_p": 0.2, "seed": 2}, {"SPEC_MIN_P": "0.3", "SPEC_SEED": "3"}, {"seed": "4"}
    layers = Layers.of(pair, environ, flags)
    settings = layers.settings
    assert (settings.max_new_tokens, settings.top_k, settings.min_p, settings.seed) == (128, 2, 0.3, 4)
    assert layers.with_console_changes(seed="5").settings.seed == 5


def test_another_pair_brings_its_defaults_below_flags_and_set() -> None:
    other = (
        Layers.of({"gamma": 2, "top_k": 20, "temperature": 0.2}, {}, {"top_k": "9"})
        .with_console_changes(temperature="1")
        .resolve({"gamma": 7, "top_k": 70, "temperature": 0.7})
    )
    assert (other.settings.gamma, other.settings.top_k, other.settings.temperature) == (7, 9, 1.0)
    assert other.resolve({}).settings.gamma == 4
    assert other.without_console_changes().settings.temperature == 0.7


def test_reset_takes_the_console_layer_away_by_name_or_whole() -> None:
    layers = Layers.of(flags={"gamma": "8"}).with_console_changes(gamma="2", length="5", top_k=3)
    assert layers.without_console_changes("length").settings.max_new_tokens == 128
    assert layers.without_console_changes("length").settings.gamma == 2
    assert layers.without_console_changes().settings == layers.defaults == Settings(gamma=8)
    refused(layers.without_console_changes, "gama", match="unknown setting 'gama'", kind=UsageError)


def test_a_refused_set_leaves_the_layers_alone_and_says_what_holds() -> None:
    layers = Layers.of(pair_defaults={"gamma": 6})
    refused(
        layers.with_console_changes, top_k=3, gamma=0, match=r"gamma must be .*, got 0 \(still 6\)", kind=UsageError
    )
    assert layers.settings == Settings(gamma=6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, {"SPEC_TOP_P": "1.5"}, {}), "SPEC_TOP_P must be above 0 and at most 1, got 1.5"),
        (({}, {}, {"top_p": "1.5"}), "--top-p must be above 0 and at most 1, got 1.5"),
        (({"gama": 1}, {}, {}), "unknown setting 'gama' (did you mean gamma?)"),
        (({"gamma": 0}, {}, {}), "gamma must be a whole number from 1 to 64 or auto, got 0"),
    ],
)
def test_a_bad_value_names_where_it_stands(arguments: Any, message: str) -> None:
    assert refused(Layers.of, *arguments, kind=UsageError) == message


def test_model_options_come_from_environment_and_flags() -> None:
    options = model_options({"SPEC_PAIR": "a", "SPEC_DEVICE": "cuda:1", "SPEC_OFFLINE": ""}, {"pair": "b"})
    assert (options.pair, options.device, options.offline) == ("b", "cuda:1", False)
    assert model_options({"HF_HUB_OFFLINE": "1"}, {}).offline
    assert not model_options({"HF_HUB_OFFLINE": "0"}, {}).offline
    assert not model_options({"HF_HUB_OFFLINE": "1", "SPEC_OFFLINE": "off"}, {}).offline
    for variable, value in (("SPEC_DEVICE", "gpu"), ("SPEC_QUANTIZATION", "int4"), ("SPEC_DTYPE", "fp16")):
        refused(model_options, {variable: value}, {}, match=f"^{variable} must be ", kind=UsageError)


@pytest.mark.parametrize(
    ("variables", "meant"),
    [
        ({"SPEC_GAMA": "3", "SPEC_FILE": "x", "SPEC_GAMMA": "3", "OTHER_GAMA": "1"}, {"GAMA": "GAMMA"}),
        ({"SPEC_CACHE_DIR": "x", "SPEC_KERNELS": "torch"}, {}),
        ({"SPEC_LENGTH": "3"}, {"LENGTH": "MAX_NEW_TOKENS"}),
        ({"SPEC_LOG": "3"}, {"LOG": "RECORD"}),
        ({"SPEC_CACHEDIR": "3"}, {"CACHEDIR": "CACHE_DIR"}),
        ({"SPEC_KERNEL": "3"}, {"KERNEL": "KERNELS"}),
        ({"SPEC_TOPP": "3"}, {"TOPP": "TOP_P"}),
    ],
)
def test_a_nearly_named_variable_is_told_and_a_foreign_one_is_not(
    variables: dict[str, str], meant: dict[str, str]
) -> None:
    assert misspelt_variables(variables) == [
        f"SPEC_{word} is not a setting (did you mean SPEC_{name}?)" for word, name in meant.items()
    ]


OFF = {
    "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram": 0,
    "expand": "none", "suffix": "off", "glide_offset": 0, "chat": False, "template": "plain",
    "ngram_multi_level": False, "ngram_filler": 1, "ngram_stop_if_unknown": False, "ngram_reset": False, "cascade": (),
    "k_matrix": (), "lenience": 1.0, "beam_top_k": 0, "min_length": 0, "length_penalty": 0.0, "thinking": "hide",
    "render": False, "slow": 1.0, "color": "never", "ascii": False, "quiet": False, "verbose": False, "debug": False,
    "log_top": 0, "record": "", "keep": False, "stop": (), "presence_penalty": 0.0,
    "logit_bias": (), "frequency_penalty": 0.0, "penalty_window": 0, "typical_p": 1.0, "special_tokens": False,
    "grammar": "", "json_schema": "", "regex": "",
}  # fmt: skip
NEVER_OFF = {
    "gamma", "max_new_tokens", "seed", "coupling", "draft_sampling", "verify", "nodes", "ngram_n", "num_beams",
    "compare", "view", "palette", "data_dir", "system",
}  # fmt: skip


def test_what_can_be_on_can_be_said_off() -> None:
    assert {name: getattr(Settings(**{name: "off"}), name) for name in OFF} == OFF
    assert {*SETTING_FIELDS} == {*OFF} | NEVER_OFF
    said = transcript("> /slow 4\n> /slow off\n> /set top_p=off")
    assert [line for line in said.splitlines() if " = " in line] == ["slow = 4", "slow = 1", "top_p = 1"]
    assert offered("/slow o") == ["/slow off"]


@pytest.mark.parametrize(
    ("name", "value", "read", "shown"),
    [
        ("cascade", "glide,maxgram", ("glide", "maxgram"), "glide,maxgram"),
        ("cascade", " llama-160m , maxgram ", ("llama-160m", "maxgram"), "llama-160m,maxgram"),
        ("cascade", ["model", "maxgram"], ("model", "maxgram"), "model,maxgram"),
        ("cascade", "", (), "(none)"),
        (
            "k_matrix",
            "[[5, 14, 10], [0, 1, 10], [0, 0, 10]]",
            ((5, 14, 10), (0, 1, 10), (0, 0, 10)),
            "[[5,14,10],[0,1,10],[0,0,10]]",
        ),
        ("k_matrix", [[2, 6], [0, 6]], ((2, 6), (0, 6)), "[[2,6],[0,6]]"),
        ("k_matrix", "", (), "(none)"),
        ("logit_bias", "12=-100,' the'=1.5", ((12, -100.0), (" the", 1.5)), "12=-100,' the'=1.5"),
        ("logit_bias", '{"12": -100, " the": 1.5}', ((12, -100.0), (" the", 1.5)), "12=-100,' the'=1.5"),
        ("logit_bias", {12: 1, "a": 2}, ((12, 1.0), ("a", 2.0)), "12=1,'a'=2"),
        ("logit_bias", [["12", 1]], (("12", 1.0),), "'12'=1"),
        ("logit_bias", r"""'a\n\',=\\'=-1, "b"=.5""", (("a\n',=\\", -1.0), ("b", 0.5)), r"'a\n\',=\\'=-1,'b'=0.5"),
        ("logit_bias", "", (), "(none)"),
        ("presence_penalty", "-0.5", -0.5, "-0.5"),
        ("frequency_penalty", -2, -2.0, "-2"),
        ("temperature", 1e-44, 0.0, "0"),
        ("lenience", "2", 2.0, "2"),
        ("lenience", 1, 1.0, "1"),
    ],
)
def test_a_value_is_read_and_shown_so_that_it_can_be_typed_again(name: str, value: Any, read: Any, shown: str) -> None:
    settings = Settings().changed(**{name: value})
    assert (getattr(settings, name), settings.show(name)) == (read, shown)
    assert getattr(Settings().changed(**{name: shown}), name) == read


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("cascade", "glyde,maxgram", f"{NAMES} (did you mean glide?), got 'glyde,maxgram' (still plain,maxgram)"),
        ("cascade", "GLIDE", f"{NAMES} (did you mean glide?), got 'GLIDE' (still plain,maxgram)"),
        ("cascade", "glide,glide", f"{NAMES}, got 'glide,glide' (still plain,maxgram)"),
        ("cascade", "glide,", f"{NAMES}, got 'glide,' (still plain,maxgram)"),
        ("cascade", ["a,b"], f"{NAMES}, got ['a,b'] (still plain,maxgram)"),
        ("cascade", 5, f"{NAMES}, got 5 (still plain,maxgram)"),
        (
            "k_matrix",
            "5,10",
            "k_matrix must be rows of whole numbers like [[5,10],[0,10]], upper triangular, got '5,10' "
            "(still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[5,10]",
            "k_matrix must be rows of whole numbers like [[5,10],[0,10]], got '[5,10]' (still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[[5,10],[3,10]]",
            "k_matrix must be upper triangular: row 2, column 1 must be 0, got '[[5,10],[3,10]]' "
            "(still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[[5,10],[10]]",
            "k_matrix must be square: 2 rows, but one of them has 1 numbers, got '[[5,10],[10]]' "
            "(still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[[-1]]",
            "k_matrix must be whole numbers from 0 to 1000, got '[[-1]]' (still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[" * 100_000,
            "k_matrix must be rows of whole numbers like [[5,10],[0,10]], upper triangular, got "
            f"'{'[' * 38}… (still [[5,10],[0,10]])",
        ),
        ("lenience", "0.5", "lenience must be from 1 to 1000000, got 0.5 (still 1)"),
        ("lenience", "1e400", "lenience must be from 1 to 1000000, got 1e400 (still 1)"),
        ("lenience", "much", "lenience must be a number from 1 to 1000000, got 'much' (still 1)"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_refused_value_says_what_is_allowed_and_what_holds(name: str, value: Any, told: str) -> None:
    settings = Settings(cascade="plain,maxgram", k_matrix="[[5,10],[0,10]]")
    assert refused(settings.changed, **{name: value}, kind=UsageError) == told


def test_flags_and_variables_set_them() -> None:
    words = ["run", "hi", "--cascade", "glide,maxgram", "--k-matrix", "[[2,6],[0,6]]", "--lenience", "2"]
    settings = layers_of(read_request([*words, "--compare", "ar,cascade,chain"], {"SPEC_LENIENCE": "3"})).settings
    assert (settings.cascade, settings.k_matrix, settings.lenience) == (("glide", "maxgram"), ((2, 6), (0, 6)), 2.0)
    found = Layers.of(
        environ={"SPEC_CASCADE": "plain,maxgram", "SPEC_K_MATRIX": "[[1,2],[0,3]]", "SPEC_LENIENCE": "4"}
    ).settings
    assert (found.cascade, found.k_matrix, found.lenience) == (("plain", "maxgram"), ((1, 2), (0, 3)), 4.0)
    refused(
        Layers.of,
        flags={"k_matrix": "[[1,2],[3,4]]"},
        match=r"^--k-matrix must be upper triangular: row 2, column 1 must be 0, got ",
        kind=UsageError,
    )
    refused(
        read_request,
        ["run", "--k-matrix"],
        {},
        match=r"^--k-matrix needs a value: rows of whole numbers like ",
        kind=UsageError,
    )


@pytest.mark.parametrize("word", ["maxgram", "cascade", "chain"])
def test_they_are_drafters_of_any_pair(word: str) -> None:
    assert choose_pair(ModelOptions(pair="smollm2", drafter=word)).drafter == word
    own = choose_pair(ModelOptions(pair="llama-2-7b-cascade", drafter="cascade"))
    assert (own.drafter, own.method) == ("cascade", "cascade")


def test_the_pairs_keys_are_defaults_that_its_own_defaults_outrank(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "defaults: {lenience: 5, gamma: 2}\n"
        "pairs:\n  a:\n    target: org/a\n    cascade: [org/b, {id: org/c, name: see}, maxgram]\n"
        "    k_matrix: [[1, 2, 3], [0, 1, 2], [0, 0, 1]]\n    lenience: 3\n    defaults: {lenience: 4}\n"
        "  b:\n    target: org/b\n    defaults: {cascade: [model, maxgram], k_matrix: '[[1, 2], [0, 3]]'}\n"
    )
    pairs = catalogue_in(file).pairs
    first, second = (Layers.of(pair_defaults=pairs[name].defaults) for name in "ab")
    assert first.settings.show("cascade") == "b,see,maxgram"
    assert first.settings.show("k_matrix") == "[[1,2,3],[0,1,2],[0,0,1]]"
    assert (first.settings.lenience, first.settings.gamma) == (4.0, 2)
    assert second.settings.show("cascade") == "model,maxgram"
    assert (second.settings.show("k_matrix"), second.settings.lenience) == ("[[1,2],[0,3]]", 5.0)


SCRIPT = """
> /set cascade
cascade = (none)
> /set cascade=glide,maxgram
cascade = glide,maxgram
> /set k_matrix
k_matrix = (none)
> /set k_matrix='[[5, 10], [0, 10]]'
k_matrix = [[5,10],[0,10]]
> /set k_matrix=[[5,10],[1,10]]
error: k_matrix must be upper triangular: row 2, column 1 must be 0, got '[[5,10],[1,10]]' (still [[5,10],[0,10]])
> /set lenience=2.5
lenience = 2.5
> /set lenience=0
error: lenience must be from 1 to 1000000, got 0 (still 2.5)
> /set cascade=plain,glide,maxgram k_matrix=[[5,14,10],[0,1,10],[0,0,10]] lenience=3
cascade = plain,glide,maxgram
k_matrix = [[5,14,10],[0,1,10],[0,0,10]]
lenience = 3
> /set cascade=plain k_matrix=[[1,2]]
error: k_matrix must be square: 1 rows, but one of them has 2 numbers, got '[[1,2]]' (still [[5,14,10],[0,1,10],[0,0,10]])
> /reset k_matrix
k_matrix = (none)
> /reset
cascade = (none)
lenience = 1
> /help lenience
/set lenience=VALUE
  setting lenience: a number from 1 to 1000000
  leniency of the drafters' reviews; 1: none
  now 1, default 1
"""  # noqa: E501


def test_a_console_sets_them_one_after_the_other() -> None:
    assert transcript(SCRIPT) == SCRIPT.strip()


def test_tab_goes_through_the_list_and_offers_published_matrices() -> None:
    words = ("model", "plain", "glide", "feature", "eagle", "tables", "ngram", "maxgram")
    expected = {
        "/set cascade=": [f"/set cascade={word}" for word in words],
        "/set cascade=glide,m": ["/set cascade=glide,model", "/set cascade=glide,maxgram"],
        "/set cascade=model,p": ["/set cascade=model,plain"],
        "/set k_matrix=[[13": ["/set k_matrix=[[13,10],[0,10]]"],
        "/drafter c": ["/drafter cascade", "/drafter chain"],
        "/compare match,match+g": ["/compare match,match+glide"],
    }
    assert {line: offered(line) for line in expected} == expected


def test_tab_knows_the_models_of_the_pairs_cascade() -> None:
    from app.console.slash_commands import completions

    assert [found.text for found in completions("/set cascade=l", ScriptedConsole(cascade="llama-160m,maxgram"))] == [
        "cascade=llama-160m"
    ]
