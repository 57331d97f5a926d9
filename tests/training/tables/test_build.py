"""Building tables and reading them back: files of every form, damage, pruning, self-written text, the lane; tables with
several next tokens of a context: counted, pruned, drafted as siblings.
"""

import gzip
import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from app.command_line.main import main
from app.lanes.answers import may_differ, run_lane
from app.lanes.lane import PairEngine
from app.prompts.questions import prompt_ids
from app.screen.output import load_engine
from app.settings.table import Settings
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.table_file import MAGIC, StaticTables
from sampling.types import Budget
from tests.support.refusals import refused
from tests.support.runs import greedy, sampler
from tests.support.tiny import VOCAB, TinyPair, tiny_pair
from tests.support.toys import ALONE
from training.tables.build import LEAST, PRIOR, Passage, build, count_levels, read_passages
from utils.loading.fit import fingerprint
from utils.progress import never

# behind 1: 2 three times, 3 twice, 4 once; behind 0 1: 2 three times, 3 once
FORKS = [Passage([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 3, 5, 1, 3, 6, 1, 4])]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    build(
        [Passage([1, 2, 3, 4, 5, 1, 2, 3, 9]), Passage([7, 7, 8, 6], start=3)],
        tmp_path / "t.bin",
        vocab_size=VOCAB,
        fingerprint="abc",
        source="a test",
    )
    return tmp_path / "t.bin"


def test_what_was_built_is_what_is_read(file: Path) -> None:
    tables = StaticTables.open(file, vocab_size=VOCAB, fingerprint="abc")
    assert next(tables.entries([4, 5, 1, 2, 3]))[1] == 9
    assert next(tables.entries([0, 1, 2]))[1] == 3
    assert next(tables.entries([7, 7, 8]))[1] == 6
    assert not list(tables.entries([7]))  # before `start` nothing is counted
    header = tables.header
    assert (header["vocab_size"], header["tokenizer"], header["max_n"], header["tokens"]) == (VOCAB, "abc", 5, 9)
    assert header["source"] == "a test"
    assert header["date"].count("-") == 2
    assert header["bytes"] == file.stat().st_size


def test_pruning_keeps_the_size_and_the_frequent(tmp_path: Path) -> None:
    often, rare = [Passage([1, 2])] * 30, [Passage([100 + i, 200 + i % 50]) for i in range(150)]
    everything = build([*often, *rare], tmp_path / "all", vocab_size=VOCAB, fingerprint=None, source="x")
    facts = build([*often, *rare], tmp_path / "few", vocab_size=VOCAB, fingerprint=None, source="x", max_mb=0.0045)
    assert facts["bytes"] <= 4500 < everything["bytes"] + 4500
    assert sum(facts["contexts"]) < sum(everything["contexts"])
    assert next(StaticTables.open(tmp_path / "few").entries([1]))[1] == 2
    refused(build, [Passage([1])], tmp_path, vocab_size=VOCAB, fingerprint=None, source="x", match="two tokens or more")


def cut(data: bytes) -> bytes:
    return data[:-100]


def flipped(data: bytes) -> bytes:
    return data[:-70] + bytes([data[-70] ^ 1]) + data[-69:]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "damaged: .* bytes instead of"),
        (flipped, "damaged: their checksum"),
        (lambda data: data[:10], "damaged: no header"),
        (lambda data: MAGIC + b"\xff\xff\xff\x7f" + data[12:], "damaged: no header"),
        (lambda data: b"GGUF" + data[4:], "does not begin with NGRAMTBL"),
        (lambda data: b"", "does not begin with NGRAMTBL"),
        (lambda data: data.replace(b'"format": 1', b'"format": 7'), "have format 7, this version reads 1"),
        (lambda data: data.replace(b'"entries": ', b'"entriex": '), "does not describe the data"),
        (lambda data: data.replace(b'"size": 1', b'"size": 0'), "does not describe the data"),
        (lambda data: data.replace(b'"vocab_size": 300', b'"vocab_size": 4  '), "ids beyond their own vocabulary"),
    ],
)
def test_damage_is_named_in_one_line(file: Path, damage: Any, said: str) -> None:
    file.write_bytes(damage(file.read_bytes()))
    assert str(file) in refused(StaticTables.open, file, match=said)


def test_a_file_that_is_overwritten_or_cut_while_it_is_used_changes_nothing(file: Path) -> None:
    tables = StaticTables.open(file)
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert next(tables.entries([4, 5, 1, 2, 3]))[1] == 9
    file.write_bytes(b"")
    assert next(tables.entries([0, 1, 2]))[1] == 3


def test_tables_of_another_vocabulary_or_tokenizer_are_refused(file: Path) -> None:
    refused(StaticTables.open, file, vocab_size=299, match="for a vocabulary of 300 ids, the target has 299")
    refused(StaticTables.open, file, fingerprint="xyz", match=r"another tokenizer \(abc, here xyz\)")
    refused(StaticTables.open, file.with_name("none"), match=r"cannot read the n-gram tables .*: No such file")


def test_the_published_bigram_list_is_read_and_unseen_ids_end_the_chain(tmp_path: Path) -> None:
    listed = tmp_path / "bigram.json"
    listed.write_text("[3, -1, null, 2]")
    drafter = LookupDrafter(StaticTables.open(listed, vocab_size=4), least=0)
    drafter.start([[0]], ALONE, ALONE)
    assert drafter.propose([[0]], Budget([5]), sampler()).tokens == [[3, 2]]
    for text, said in (
        ("[1, 2, 3, 4, 0]", "5 ids, the target has 4"),
        ('[1, "a"]', "entry 1 must be an id below 4"),
        ("[1, 4]", "entry 1 must be an id below 4"),
        ("[1, true]", "entry 1"),
        ("[1, 2", "begins like JSON and is none"),
    ):
        listed.write_text(text)
        refused(StaticTables.open, listed, vocab_size=4, match=said)


# -- sources --------------------------------------------------------------------------------------


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_every_form_of_source_is_read(tmp_path: Path) -> None:
    lines = [{"ids": [1, 2, 3], "start": 1}, {"text": "ab"}, {"prompt": "c"}, {"ids": [4]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    (tmp_path / "b.txt").write_text("first\nstill\n\n\nsecond")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    found = [*read_passages(tmp_path / "a.jsonl", codes, VOCAB), *read_passages(tmp_path / "b.txt", codes, VOCAB)]
    assert [*read_passages(tmp_path / "a.jsonl.gz", codes, VOCAB)] == found[:4]
    assert found[:4] == [Passage([1, 2, 3], 1), Passage([97, 98]), Passage([99]), Passage([4])]
    assert [one.ids for one in found[4:]] == [codes("first\nstill"), codes("\nsecond")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("3", "must be a JSON object"),
        ('{"name": 1}', 'needs "ids", "text" or "prompt", has name'),
        ('{"ids": "1"}', "ids must be a list"),
        ('{"ids": [1, 2.5]}', "ids must be a list"),
        ('{"ids": [1, 300]}', "id 300 lies outside the vocabulary of 300"),
        ('{"ids": [-1, 3]}', "id -1 lies outside"),
        ('{"ids": [1], "start": 2}', "start must be"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"ids": [1]}\n' + line)
    refused(list, read_passages(tmp_path / "a.jsonl", codes, VOCAB), match=rf"a\.jsonl:2: {said}")


# -- the program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def built(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables that the tiny target has written for itself, through the command."""
    out = tmp_path_factory.mktemp("built") / "made"
    words = ["distill", "--stage", "tables", "--out", str(out), "--tokens", "400", "--seed", "3", "--quiet"]
    assert main([*words, *pair.flags()]) == 0
    return out / "tables.bin"


def engine_of(pair: TinyPair, drafter: str) -> PairEngine:
    return load_engine(Settings(quiet=True), pair.options(drafter), never)


def test_self_written_tables_draft_for_their_target(pair: TinyPair, built: Path) -> None:
    engine = engine_of(pair, f"tables:{built}")
    assert engine.drafters.tables() is not None
    for temperature in (0.0, 0.8):
        changed = Settings(max_new_tokens=24, quiet=True, temperature=temperature)
        lanes = [engine.lane(name, changed) for name in ("ar", "spec", "tables")]
        assert not any(may_differ(lane) for lane in lanes)
        assert lanes[1].source_names == lanes[2].source_names == ("match", "tables")
        prompt = prompt_ids(engine, "tell me", changed)
        plain, spec, tables = (run_lane(one, prompt, engine.tokenizer.decode, interrupt=never).ids for one in lanes)
        assert plain == spec == tables


def test_without_a_file_the_conversation_alone_drafts_and_a_note_says_so(pair: TinyPair) -> None:
    engine = engine_of(pair, "tables")
    assert engine.drafters.tables() is None
    assert "no n-gram tables" in engine.loaded.notes[-1]
    assert isinstance(engine.lane("tables", Settings()).drafter, LookupDrafter)


def test_tables_that_do_not_fit_are_told_with_a_way_on(pair: TinyPair, file: Path) -> None:
    refused(engine_of, pair, f"tables:{file}", match=r"made with another tokenizer.*--drafter ngram goes without")


def test_the_shipped_tables_fit_the_default_target(default_pair: Any) -> None:
    file = Path(default_pair.spec.tables)
    known = StaticTables.open(file, vocab_size=default_pair.vocab_size, fingerprint=fingerprint(default_pair.tokenizer))
    assert file.stat().st_size <= 10_000_000
    assert sum(known.header["contexts_found"]) > 100_000
    assert (file.parent / "README.md").is_file()
    assert next(known.entries(default_pair.tokenizer("One of the most", add_special_tokens=False)["input_ids"]))[0] > 1


# -- several next tokens of a context --------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 5), min_size=3, max_size=80), most=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_a_plain_count(ids: list[int], most: int) -> None:
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    shares = Counter(ids[1:])
    for before, after in itertools.pairwise(ids):
        seen[before][after] += 1
    level = count_levels([Passage(ids)], 1, most=most)[0]
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for key, token, confidence in zip(level.keys, level.tokens, level.confidence, strict=True):
        found[int(key)].append((int(token), float(confidence)))
    assert set(found) == set(seen)
    for context, counts in seen.items():
        total = sum(counts.values())
        law = {w: (c + PRIOR * shares[w] / (len(ids) - 1)) / (total + PRIOR) for w, c in counts.items()}
        ranked = sorted(law, key=lambda w: (-law[w], w))
        kept = [w for place, w in enumerate(ranked[:most]) if place == 0 or law[w] >= LEAST]
        assert [token for token, _ in found[context]] == kept
        assert [chance for _, chance in found[context]] == pytest.approx([law[w] for w in kept])


def test_a_tree_has_the_choices_of_a_context_as_siblings(tmp_path: Path) -> None:
    build(FORKS, tmp_path / "t.bin", vocab_size=64, fingerprint=None, source="", choices=3, max_mb=1.0, max_n=3)
    drafter = LookupDrafter(StaticTables.open(tmp_path / "t.bin"), matches=False, tree=True, least=0.01)
    drafter.start([[9, 1]], ALONE, ALONE)
    (tree,) = drafter.propose([[9, 1]], Budget([8]), greedy()).trees
    assert tree.path_tokens(tree.children[0]) == [2, 3, 4]
