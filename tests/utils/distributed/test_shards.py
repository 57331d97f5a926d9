"""A target shared by several processes: the same output as one process, refusals in one line, clean ends.

The processes are real; those of tests/support/ranks.py stand in for torchrun's, one test starts torchrun itself.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import tty
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.command_line.main import main
from app.command_line.subcommands import COMMANDS
from app.lanes.processes import check_world
from app.screen.terminal import Interrupts, RemoteKeys, is_remote
from app.settings.table import ModelOptions
from sampling.drafters.draft_heads.checkpoint import save_student
from sampling.models.causal import CausalLM
from sampling.models.network import TransformersNetwork
from sampling.types import Draft
from tests.support.ranks import Ranks, free_port, infer
from tests.support.students import close, make_student, make_target
from tests.support.tiny import VOCAB, tiny_tokenizer
from tests.support.warm import Warm
from utils.distributed.world import World
from utils.errors import UsageError, UserError
from utils.loading.shards import check_shards

ROOT = Path(__file__).parents[3]
LANES = "ar,spec,ngram,glide"


def whole_target() -> Any:
    return make_target(VOCAB, hidden_size=36, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose target has 9 heads over 3 key/value heads, with a drafter model and a GLIDE student."""
    folder = tmp_path_factory.mktemp("shards")
    target = whole_target()
    drafter = make_target(VOCAB, num_attention_heads=4, num_key_value_heads=2)
    for model, name in ((target, "target"), (drafter, "drafter")):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    save_student(folder / "glide", make_student("glide", target))
    text = f"pairs:\n  tiny:\n    target: {{path: {folder}/target}}\n    drafter: {{path: {folder}/drafter}}\n"
    (folder / "models.yaml").write_text(f"default: tiny\n{text}    students: {{glide: {folder}/glide}}\n")
    return folder / "models.yaml"


def words(catalogue: Path, *more: str, tokens: int = 12) -> list[str]:
    return ["run", "tell me", "--models", str(catalogue), "--device", "cpu", "--max-new-tokens", str(tokens), *more]


def test_three_processes_answer_as_one_does(
    catalogue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(catalogue, "--compare", LANES, "--gamma", "3", "--json")
    with Ranks(tmp_path, 3, infer, [*given, "--tp-size", "3"]) as ranks:
        codes = ranks.codes()
        assert codes == [0, 0, 0], [ranks.errors(rank) for rank in range(3)]
        assert [ranks.out(rank) + "".join(ranks.errors(rank)) for rank in (1, 2)] == ["", ""]
        shared = json.loads(ranks.out(0))
    assert main(given) == 0
    alone = json.loads(capsys.readouterr().out)
    for ours, theirs in zip(shared["results"], alone["results"], strict=True):
        assert ours["ids"] == theirs["ids"]
        assert ours["draft_n_accepted"] == theirs["draft_n_accepted"]  # GLIDE read the same keys
    assert len({tuple(result["ids"]) for result in shared["results"]}) == 1


def steps(lm: Any) -> list[Tensor]:
    """What a session says while it does everything a session can do: ragged rows, a tree, copies, reads."""

    def read(session: Any, layer: int) -> list[Tensor]:
        """Keys and values of the slots that hold tokens; what lies in the others is nobody's."""
        key, value, valid = session.kv(layer)
        return [part[row, :, :count].clone() for part in (key, value) for row, count in enumerate(valid.tolist())]

    session = lm.open([[3, 4, 5, 6], [7, 8]], hidden=True)
    found = [session.score([[3, 4, 5, 6], [7, 8]], Draft(torch.tensor([[9, 10], [11, 12]])))]
    found += read(session, 2)
    session.commit(torch.tensor([[0, 1], [0, -1]]))
    found += [session.hidden()[0, :6].clone(), *read(session, 1)]
    rows = [[3, 4, 5, 6, 9, 10, 13], [7, 8, 11, 14]]
    tree = Draft(torch.tensor([[20, 21, 22], [23, 24, 25]]), parents=torch.tensor([-1, -1, 0]))
    found.append(session.score(rows, tree))
    session.commit(torch.tensor([[0, 2], [1, -1]]))
    found += read(session, 1)
    twin = session.fork()
    session.select(torch.tensor([1, 1, 0]))
    found += [*read(session, 0), twin.score([rows[0][:3], rows[1]], Draft.empty(2)), *read(twin, 0)]
    return found


def shared_steps(target: str, out: str) -> int:
    """A rank's whole run without the program around it: the target by the library, then `steps`."""
    import utils.distributed.process_group as teams
    from app.lanes import processes
    from app.lanes.pairing import load_options
    from sampling.models.sharded import ShardedNetwork
    from utils.catalogue.specs import spec_from_argument
    from utils.loading.loading import _share
    from utils.progress import never, silent

    world, options = World.of(os.environ), ModelOptions(device="cpu")
    if world.rank:
        return processes.serve(options, world, sys.stderr)
    loaded, _ = _share(spec_from_argument(target), load_options(options), silent, never)
    team = teams.known()
    assert team is not None
    assert loaded.shard is not None
    network = ShardedNetwork(loaded.model, team, loaded.shard)
    found = steps(CausalLM(network))
    torch.save([*found, network.get_input_embeddings().weight, network.get_output_embeddings().weight], out)
    with pytest.raises(UserError, match="only here"):  # met by no other rank: they stay in step
        CausalLM(network).open([[1]]).score([[1, 2]], Draft(torch.tensor([[1, 2]]), parents=_Refusing()))  # type: ignore[arg-type]
    found = steps(CausalLM(network))
    team.leave()
    return 0


class _Refusing:
    """Parents that are refused before any pass."""

    def tolist(self) -> list[int]:
        raise UserError("only here")


def test_a_shared_session_does_what_one_of_a_whole_model_does(catalogue: Path, tmp_path: Path) -> None:
    target = str(catalogue.parent / "target")
    with Ranks(tmp_path, 3, shared_steps, target, str(tmp_path / "found.pt")) as ranks:
        assert ranks.codes() == [0, 0, 0], [ranks.errors(rank) for rank in range(3)]
    *shared, embedding, head = torch.load(tmp_path / "found.pt")
    whole = whole_target()
    for got, wanted in zip(shared, steps(CausalLM(TransformersNetwork(whole))), strict=True):
        close(got, wanted, 1e-4)
    assert torch.equal(embedding, whole.get_input_embeddings().weight)
    assert torch.equal(head, whole.get_output_embeddings().weight)


def test_two_processes_cannot_share_nine_heads(catalogue: Path, tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, infer, words(catalogue)) as ranks:
        assert ranks.codes()[0] == 2
        wanted = (
            "error: 2 processes cannot share target: its 9 attention heads and 3 key/value heads do not divide by 2"
        )
        assert ranks.errors(0) == [f"{wanted} (3 can)"]
        assert (ranks.codes()[1], ranks.out(1), ranks.errors(1)) == (0, "", [])


@pytest.mark.parametrize("killed", [1, 0], ids=["a server", "rank 0"])
def test_the_death_of_a_process_ends_the_others_with_one_line(catalogue: Path, tmp_path: Path, killed: int) -> None:
    with Ranks(tmp_path, 3, infer, words(catalogue, "--compare", "ar", "--quiet", tokens=240)) as ranks:
        ranks.wait_for_text()
        ranks.signal(signal.SIGKILL, killed)
        codes = ranks.codes(60)
        assert codes == [-signal.SIGKILL if rank == killed else 1 for rank in range(3)]
        said = [line for rank in range(3) for line in ranks.errors(rank)]
        assert said == [f"error: rank {killed} (process {ranks.processes[killed].pid}) has died"]
        assert killed == 0 or ranks.errors(0) == said


def wait_for_one_who_died(folder: str, functional: bool) -> int:
    """Rank 1 dies while somebody holds its connections open, as if gloo had missed their end; the others wait."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce

    from utils.distributed.process_group import LostError, joined

    world = World.of(os.environ)
    team = joined(world, "cpu")
    if world.rank == 1:
        if (holder := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        (Path(folder) / "holder").write_text(str(holder))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with team.in_step():
            if functional:
                (all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1).sum().item()
            dist.all_reduce(torch.ones(3))
    except LostError as error:
        sys.stdout.write(str(error))
        return 1
    return 0


@pytest.mark.parametrize("functional", [False, True], ids=["collective", "functional"])
def test_who_waits_for_a_process_that_died_unnoticed_is_let_go(tmp_path: Path, functional: bool) -> None:
    with Ranks(tmp_path, 3, wait_for_one_who_died, str(tmp_path), functional) as ranks:
        try:
            assert ranks.codes(30) == [1, -signal.SIGKILL, 1]
        finally:
            os.kill(int((tmp_path / "holder").read_text()), signal.SIGKILL)
        told = f"rank 1 (process {ranks.processes[1].pid}) has died"
        assert [ranks.out(0), ranks.out(2)] == [told, told]


def infer_and_come_back(words: list[str]) -> int:
    code = infer(words)
    sys.stdout.write("came back")
    return code


def test_no_process_of_several_comes_to_an_interpreters_end_that_gloo_could_abort(
    catalogue: Path, tmp_path: Path
) -> None:
    with Ranks(tmp_path, 3, infer_and_come_back, words(catalogue, "--compare", "ar", "--quiet", tokens=6)) as ranks:
        assert ranks.codes() == [0, 0, 0]
        assert ranks.out(0).strip()
        assert not any("came back" in ranks.out(rank) for rank in range(3))


def test_ctrl_c_in_every_process_stops_the_answer_and_leaves_nothing_behind(catalogue: Path, tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, infer, words(catalogue, "--compare", "ar", "--quiet", tokens=240)) as ranks:
        ranks.wait_for_text()
        ranks.signal(signal.SIGINT)
        assert ranks.codes(60) == [130, 0, 0]
        assert ranks.out(0).endswith("\n")
        assert [ranks.errors(rank) for rank in range(3)] == [[], [], []]


def take_turns(folder: str) -> int:
    """Make a file that is made where it is missing; report what was made and what was found."""
    from utils.distributed.process_group import joined

    world, made = World.of(os.environ), Path(folder) / "made"

    def make() -> str:
        if made.exists():
            return "found"
        made.touch()
        return "made"

    def fail() -> None:
        if world.rank == 1:
            raise UserError("no room")

    team = joined(world, "cpu")
    sys.stdout.write(team.in_turn(make))
    try:
        team.together(fail)
    except UserError as error:
        sys.stdout.write(f", {error}")
    return 0


def test_what_is_missing_is_made_once_and_what_fails_anywhere_is_raised_everywhere(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, take_turns, str(tmp_path)) as ranks:
        assert ranks.codes() == [0, 0, 0]
        told = [ranks.out(rank) for rank in range(3)]
    assert told == ["made, rank 1: no room", "found, no room", "found, rank 1: no room"]


SHARING = [name for name, row in COMMANDS.items() if row.shares]


@pytest.mark.parametrize(
    ("command", "size", "world", "told"),
    [
        ("run", 3, World(), "tp_size is 3, but one process runs"),
        ("bench", 2, World(1, 3, 1, 3), "tp_size is 2, but torchrun started 3"),
        ("distill", "auto", World(0, 3, 0, 3), "distill runs in one process, torchrun started 3"),
    ],
)
def test_a_count_of_processes_that_does_not_go_is_refused(command: str, size: Any, world: World, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_world(command, ModelOptions(tp_size=size), world, SHARING)
    check_world("run", ModelOptions(tp_size=3), World(2, 3, 0, 1), SHARING)
    check_world("distill", ModelOptions(), World(), SHARING)


def test_one_rank_alone_says_that_the_command_line_is_wrong() -> None:
    said = []
    for rank in range(2):
        told = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        command = [sys.executable, str(ROOT / "infer.py"), "run", "hello", "--tp-size", "2"]
        done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        said.append(done.stderr)
    (line,) = said[0].splitlines()
    assert line.startswith("error: tp_size is 2, but torchrun started 3")
    assert said[1] == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization": "int8"}, "quantization int8 goes with one process, 3 share the target"),
        ({"device": "mps"}, "device must be auto, cpu or cuda where processes share a target, got 'mps'"),
        ({"tp_size": 9}, "its 9 attention heads and 3 key/value heads do not divide by 9"),
    ],
)
def test_targets_that_cannot_be_shared_are_refused_by_name(catalogue: Path, changes: dict[str, Any], told: str) -> None:
    from utils.catalogue.specs import spec_from_argument
    from utils.loading.loaded import LoadOptions

    folder = catalogue.parent / "target"
    options = LoadOptions(**{"device": "cpu", "tp_size": 3, **changes})
    with pytest.raises(UsageError, match=told):
        check_shards(spec_from_argument(str(folder)), folder, options, 3)


def test_three_machines_of_one_process_each_answer_as_one_machine(catalogue: Path, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "3", "--nproc_per_node", "1"]
    start += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    run = [str(ROOT / "infer.py"), *words(catalogue, "--compare", "ar,spec", "--json", "--quiet", tokens=6)]
    nodes = [
        Warm(
            [*start, "--node_rank", str(rank), *run],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    said = [node.communicate(timeout=500) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], "\n".join(error for _, error in said)
    first, *others = said
    assert json.loads(first[0])["same_output"] is True
    assert [out for out, _ in others] == ["", ""]


def test_ctrl_c_on_a_terminal_whose_signals_go_elsewhere_is_heeded_between_rounds() -> None:
    keys, terminal = pty.openpty()
    try:
        assert is_remote(terminal)
        tty.setraw(terminal)
        far = RemoteKeys(terminal)
        os.write(keys, b"next \x03line")
        far.look()
        assert far.taken() == ""  # nobody asked it to watch
        far.watching = True
        with Interrupts() as stop:
            far.look()
            assert stop()
        assert (far.taken(), far.taken()) == ("next line", "")
    finally:
        os.close(keys)
        os.close(terminal)
