"""Which drafters fit a target: ids compared one by one, padding allowed, anything else named."""

from types import SimpleNamespace

import pytest

from tests.support.refusals import refused
from tests.support.tiny import tiny_model, tiny_tokenizer
from utils.catalogue.specs import PairSpec, spec_from_argument
from utils.loading.fit import check_fit, fingerprint, fit_notes, spoken_ids
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair


def model(name: str, vocab_size: int, context: int = 100):
    return SimpleNamespace(name=name, vocab_size=vocab_size, context=context)


def tokenizer(*tokens: str):
    return SimpleNamespace(get_vocab=lambda: {token: i for i, token in enumerate(tokens) if token})


def test_a_token_of_spaces_is_the_same_however_a_tokenizer_spells_it():
    pair = model("big", 3), model("small", 3)
    assert check_fit(*pair, (tokenizer("a", "  ", "▁c"), tokenizer("a", "▁▁", "▁c"))) == []
    assert check_fit(*pair, (tokenizer("a", "  ", "▁c"), tokenizer("a", "▁", "▁c"))) != []


def test_padding_of_different_length_fits_and_is_never_said():
    big, small = model("big", 152064), model("small", 151936)
    tokens = [f"t{i}" for i in range(151665)]
    assert check_fit(big, small, (tokenizer(*tokens), tokenizer(*tokens))) == []
    assert spoken_ids(big, tokenizer(*tokens)) == spoken_ids(small, tokenizer(*tokens)) == 151665
    assert spoken_ids(big, tokenizer()) == 152064
    assert spoken_ids(model("short", 100), tokenizer(*tokens)) == 100


def test_names_that_a_converter_gives_to_padding_are_no_tokens():
    big, small = model("big", 6), model("small", 4)
    named, bare = tokenizer("a", "b", "[PAD1]", "[PAD3]", "[PAD4]", "[PAD5]"), tokenizer("a", "b", "[PAD1]")
    assert check_fit(big, small, (named, bare)) == check_fit(big, small, (bare, named)) == []
    assert spoken_ids(big, named) == spoken_ids(big, bare) == 3  # "[PAD1]" is the name of another id
    assert fingerprint(named) == fingerprint(bare)


@pytest.mark.parametrize(
    ("ours", "theirs", "differ"),
    [
        (("a", "b", "c"), ("a", "b", "c"), []),
        (("a", "b", "c"), ("a", "x", "y"), ["id 1 is 'b' and 'x'"]),
        (("a", "b"), ("a", "b", "<tool>"), ["id 2 is no token and '<tool>'"]),
    ],
)
def test_the_same_tokens_fit_and_the_first_differing_id_is_named_with_both_tokens(ours, theirs, differ):
    assert check_fit(model("big", 4), model("small", 4), (tokenizer(*ours), tokenizer(*theirs))) == [
        f"the vocabularies of big and small differ: {each}" for each in differ
    ]


def test_a_token_that_the_drafter_has_no_row_for_fits():
    """It is never drafted. A token that only the drafter's tokenizer has shows that it is another tokenizer."""
    more, less = tokenizer("a", "b", "<pad>"), tokenizer("a", "b")
    assert check_fit(model("big", 3), model("small", 2), (more, less)) == []
    assert check_fit(model("big", 3), model("small", 2), (more, more)) == []
    assert check_fit(model("big", 2), model("small", 3), (less, more)) == [
        "token '<pad>' (id 2) lies outside the vocabulary both models have (big 2, small 3)"
    ]


def test_a_drafter_without_tokenizer_is_trusted_only_if_the_sizes_agree():
    big, same, other = model("big", 3), model("small", 3), model("small", 4)
    ours = tokenizer("a", "b", "c")
    assert check_fit(big, same, (ours, None)) == []
    assert fit_notes(big, same, (ours, None)) == [
        "small has no tokenizer files: assumed to use the other model's, as the sizes agree"
    ]
    assert check_fit(big, other, (ours, None)) == [
        "small has no tokenizer files and the vocabularies differ in size (big 3, small 4)"
    ]


def test_a_shorter_context_of_the_drafter_is_named_and_a_longer_one_is_not():
    ours = tokenizer("a")
    assert fit_notes(model("big", 1, 8192), model("small", 1, 2048), (ours, ours)) == [
        "small has a context of 2048 tokens, big 8192: the pair runs with 2048"
    ]
    assert fit_notes(model("big", 1, 100), model("small", 1, 200), (ours, ours)) == []


def save(folder, *, tokens=None, **shape):
    tiny_model(**shape).save_pretrained(folder)
    if tokens is not None:
        tokens.save_pretrained(folder)
    return spec_from_argument(str(folder))


def test_loading_takes_a_drafter_that_speaks_another_vocabulary_and_says_so(tmp_path):
    strange = tiny_tokenizer()
    strange.add_tokens(["<other>"])
    target = save(tmp_path / "target", tokens=tiny_tokenizer())
    pair = load_pair(
        PairSpec(name="x", target=target, drafter=save(tmp_path / "drafter", tokens=strange)), LoadOptions(device="cpu")
    )
    assert pair.drafter is not None
    assert pair.drafter.vocabulary is not None
    assert pair.notes[0].startswith("target runs in torch: no compiled pass computes llama as configured: heads")
    assert pair.notes[1:] == ("drafter has other tokens than target: drafts are translated (see infer.py check)",)


def test_a_note_names_the_setting_of_the_pair_that_asks_for_transformers_own_pass(tmp_path):
    target = save(tmp_path / "target", tokens=tiny_tokenizer()).model_copy(update={"attn_implementation": "eager"})
    pair = load_pair(PairSpec(name="x", target=target, drafter="ngram"), LoadOptions(device="cpu"))
    assert pair.notes == ("target runs in torch: attn_implementation eager asks for transformers' own pass",)


def test_loading_refuses_a_drafter_whose_tokens_nobody_knows(tmp_path):
    target = save(tmp_path / "target", tokens=tiny_tokenizer())
    assert refused(
        load_pair,
        PairSpec(name="x", target=target, drafter=save(tmp_path / "drafter", vocab_size=310)),
        LoadOptions(device="cpu"),
    ) == (
        "drafter cannot draft for target: drafter has no tokenizer files and the vocabularies differ in size "
        "(target 300, drafter 310)"
    )
