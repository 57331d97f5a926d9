"""`selftest` at small sizes: its page, its files, and that faults put in on purpose are found and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import sampling.loop
import sampling.verify.rules
from app.command_line.main import main
from app.measure import proofs, selftest
from app.measure.proofs import Amount, Checks, Found, WrongError
from app.measure.selftest import QUICK, Check, Place, SkippedError, run_parts
from app.settings.table import ModelOptions, Settings
from sampling.models.cache import Buffer
from sampling.models.causal import CausalSession
from sampling.types import Draft, Rows, Rule, Sampler, Verdict
from tests.support.reference import chi_square_p
from tests.support.tiny import tiny_pair

CPU, FLOAT32 = torch.device("cpu"), torch.float32
SMALL = Amount(2, 24, 1000)
real_verify = sampling.loop.verify


def place(**options: Any) -> Place:
    return Place(CPU, ModelOptions(device="cpu", **options), Settings(), replace(QUICK, amount=SMALL))


def core(precision: torch.dtype = FLOAT32) -> dict[str, Check]:
    """The core's checks by what they check."""
    checks = run_parts({"proofs": lambda place: proofs.core(CPU, precision, SMALL)}, place())
    return {check.name.partition(": ")[2]: check for check in checks}


# -- a run ----------------------------------------------------------------------------------------


def masked(page: str) -> str:
    """The page without what another run or machine says otherwise: figures, ties, the machine."""
    page = re.sub(r"^`python.*`$", "`COMMAND`", page, flags=re.MULTILINE)
    page = re.sub(r"^speculative.* on cpu .*$", "MACHINE", page, flags=re.MULTILINE)
    page = re.sub(r"\d[\d.,]*(e[+-]?\d+)?(?<!,)", "#", page)
    return page.replace("# of them part at a tie within rounding", "all the same")


def test_a_run_on_the_cpu_proves_measures_and_writes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    snapshot: SnapshotAssertion,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # names in one line
    monkeypatch.setattr(selftest, "QUICK", replace(QUICK, amount=SMALL))
    pair, out = tiny_pair(tmp_path / "pair", stop=False), tmp_path / "made" / "here"
    capsys.readouterr()
    code = main(["selftest", "--quick", "--quiet", *pair.flags(), "--out", str(out)])
    said = capsys.readouterr()
    report = json.loads((out / "selftest.json").read_text())
    assert [check for check in report["checks"] if check["state"] == "failed"] == []
    assert (code, said.err) == (0, "")
    assert report["command"].startswith("python infer.py selftest --quick --quiet --target")
    assert report["summary"] | {"seconds": 0} == {
        "ok": len(report["checks"]) - 1,
        "failed": 0,
        "skipped": 1,
        "seconds": 0,
    }
    assert sorted(report["machine"])[:3] == ["cpu_count", "date", "device"]
    figures = {check["name"]: check["figures"] for check in report["checks"]}
    assert list(figures["passes over 1 to 9 rows"]["seconds"]) == [*"123456789"]
    assert list(figures["EAGLE-shaped head, gamma 1 to 8"]["gammas"]) == [*"12345678"]
    assert masked((out / "selftest.md").read_text()) == snapshot
    for check in report["checks"]:
        assert f"{check['part']}: {check['name']}" in " ".join(said.out.split())


def test_what_is_asked_for_is_done_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--parts", "processes", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (check,) = json.loads((tmp_path / "selftest.json").read_text())["checks"]
    assert (check["part"], check["state"]) == ("processes", "skipped")
    assert check["text"].startswith("takes two GPUs")
    assert main(["selftest", "--parts", "prooves", "--device", "cpu"]) == 2
    assert "error: --parts must be a comma list of proofs, quantized, pair" in capsys.readouterr().err


def test_a_default_target_that_is_not_here_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path))
    (check,) = run_parts({"pair": selftest.pair}, place(offline=True))
    assert check.state == "skipped"
    assert "SmolLM2-135M-Instruct is not here: " in check.text
    (check,) = run_parts({"pair": selftest.pair}, place(target=str(tmp_path / "nowhere"), drafter="ngram"))
    assert check.state == "failed"


def test_without_bitsandbytes_its_checks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.importlib.util, "find_spec", lambda name: None)
    checks = run_parts({"quantized": selftest.quantized}, place())
    states = [(check.name, check.state) for check in checks]
    assert states == [("int8: loading", "skipped"), ("nf4: loading", "skipped")]


# -- faults put in on purpose -----------------------------------------------------------------------


def accepts_one_more(
    logits: torch.Tensor, draft: Draft, rows: Rows, keys: torch.Tensor, sampler: Sampler, rule: Rule
) -> Verdict:
    """Of a chain the first refused draft is taken all the same."""
    verdict = real_verify(logits, draft, rows, keys, sampler, rule)
    if draft.parents is not None or not draft.tokens.shape[1]:
        return verdict
    path = verdict.path.clone()
    for row, taken in enumerate((path >= 0).sum(dim=1).tolist()):
        if taken < path.shape[1] and draft.tokens[row, taken] >= 0:
            path[row, taken] = taken
    return replace(verdict, path=path)


def cropped_only(self: Buffer, moves: torch.Tensor, length: int) -> None:
    """What a tree's accepted nodes have left in the cache stays where it was."""
    self.crop(length)


CHAINS = ("identity, model chain", "identity, feature head")
FAULTS: dict[str, tuple[Any, str, Any, dict[str, str]]] = {  # where, what, what instead, which checks say what
    "a wrong acceptance rule": (
        sampling.loop,
        "verify",
        accepts_one_more,
        {
            **dict.fromkeys(CHAINS, r"the text leaves plain decoding's at token \d+"),
            **dict.fromkeys(
                ("counting, token by token", "counting, block"), "sampled text has not the target's distribution"
            ),
        },
    ),
    "a refusal answered by a draw from the whole distribution": (
        sampling.verify.rules,
        "residual",
        lambda p, q: p,
        {"counting, token by token": "sampled text has not the target's distribution"},
    ),
    "a cache that is not rolled back": (
        Buffer,
        "crop",
        lambda self, length: None,
        {"cache audit": r"after \d+ rounds logits are .* off those of a fresh cache"},
    ),
    "a tree whose path is not moved together": (
        Buffer,
        "shift",
        cropped_only,
        {
            "identity, branching tree": r"the text leaves plain decoding's at token \d+",
            "cache audit": r"after \d+ rounds logits are .* off those of a fresh cache",
        },
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_put_in_on_purpose_is_found_and_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead, named = FAULTS[fault]
    monkeypatch.setattr(where, name, instead)
    for precision in (FLOAT32, torch.bfloat16):
        found = core(precision)
        assert found["passes of different width"].state == "ok"
        for check, said in named.items():
            assert found[check].state == "failed", (check, found[check].text)
            assert re.search(said, found[check].text)


def test_drafts_that_share_one_fate_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "noisy", lambda model, noise: proofs.make_target(model.config.vocab_size, seed=99))
    monkeypatch.setattr(proofs, "SHARE", 1.0)
    found = core()["identity, feature head"]
    assert (found.state, found.text[:17]) == ("failed", "nothing is proved")


def test_logits_that_are_no_numbers_are_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    real = proofs.make_target

    def broken(*sizes: Any, **changes: Any) -> Any:
        model = real(*sizes, **changes)
        model.lm_head.weight[0] = float("nan")
        return model

    monkeypatch.setattr(proofs, "make_target", broken)
    assert {check.state for check in core().values()} == {"failed"}


def test_a_network_whose_wide_passes_are_wrong_cannot_hide_behind_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CausalSession.cut

    def cut(self: CausalSession, logits: torch.Tensor) -> torch.Tensor:
        return real(self, logits) + 0.1 * (logits.shape[1] > 1) * torch.arange(logits.shape[-1])

    monkeypatch.setattr(CausalSession, "cut", cut)
    found = core()["passes of different width"]
    assert (found.state, "float32 allows" in found.text) == ("failed", True)


# -- one that fails does not stop the others ----------------------------------------------------------


def parts(*checks: Callable[[], Found]) -> Callable[[Place], Checks]:
    def made(place: Place) -> Iterator[tuple[str, Callable[[], Found]]]:
        yield from ((f"check {number}", check) for number, check in enumerate(checks))

    return made


def raising(error: Exception) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error

    return act


def test_what_fails_is_listed_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unprepared(place: Place) -> Checks:
        raise RuntimeError("CUDA out of\nmemory")
        yield

    fine = parts(lambda: ("well", {}))
    wrong = parts(raising(WrongError("it is wrong")), raising(SkippedError("no wings")), lambda: ("well | done", {}))
    made = {"proofs": wrong, "pair": unprepared, "passes": fine}
    monkeypatch.setattr(selftest, "PARTS", made)
    assert main(["selftest", "--device", "cpu", "--quiet", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "selftest.json").read_text())
    assert [(one["part"], one["name"], one["state"], one["text"]) for one in report["checks"]] == [
        ("proofs", "check 0", "failed", "it is wrong"),
        ("proofs", "check 1", "skipped", "no wings"),
        ("proofs", "check 2", "ok", "well | done"),
        ("pair", "preparing", "failed", "RuntimeError: CUDA out of memory"),
        ("passes", "check 0", "ok", "well"),
    ]
    assert "2 ok, 2 failed, 1 skipped" in capsys.readouterr().out
    assert "| well \\| done |" in (tmp_path / "selftest.md").read_text()


def test_a_number_format_that_cannot_be_prepared_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(device: torch.device, dtype: torch.dtype, amount: Amount) -> Checks:
        if dtype == torch.bfloat16:
            raise RuntimeError("no such numbers here")
        yield str(dtype), lambda: ("well", {})

    monkeypatch.setattr(selftest, "core", prepared)
    checks = run_parts({"proofs": selftest.proofs}, place())
    assert [(check.name, check.state) for check in checks] == [
        ("torch.float32", "ok"),
        ("bfloat16: preparing", "failed"),
        ("torch.float16", "ok"),
    ]


def test_an_interrupt_ends_it_behind_the_check_that_ran() -> None:
    pressed = iter([False, True])
    stopped = replace(place(), interrupted=lambda: next(pressed))
    checks = run_parts({"a": parts(*[lambda: ("well", {})] * 3), "b": parts(lambda: ("well", {}))}, stopped)
    assert [check.name for check in checks] == ["check 0", "check 1"]


# -- its own arithmetic -----------------------------------------------------------------------------


def test_the_chi_square_is_that_of_scipy() -> None:
    law = dict(enumerate((0.4, 0.3, 0.2, 0.0996, 0.0002, 0.0002)))
    for counts in ({0: 400, 1: 300, 2: 200, 3: 100}, {0: 450, 1: 290, 2: 170, 3: 89, 4: 1}, {0: 1000}):
        assert proofs.chi_square_p(counts, law) == pytest.approx(chi_square_p(counts, law), abs=1e-9)
    assert proofs.chi_square_p({0: 400, 9: 600}, law) == 0


def test_the_scale_is_the_largest_that_memory_and_time_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    def scale(free: float, bandwidth: float) -> tuple[int, int]:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
        return selftest.scale_of(CPU, torch.bfloat16, bandwidth, selftest.WHOLE)

    assert selftest.weights((1, 32)) == 6_607_077_376  # Llama-2-7B's 6,738,415,616 less embedding and norms
    assert scale(80e9, 3e12) == (1, 32)
    assert scale(30e9, 3e12) == (1, 16)
    assert scale(80e9, 20e9)[0] > 1
    assert scale(1e6, 20e9) == selftest.SCALES[-1]


def test_two_processes_say_what_one_does() -> None:
    told, figures = selftest.shared("cpu")
    assert told == "48 tokens, the same as in one process"
    assert len(set(map(tuple, figures["ids"].values()))) == 1
