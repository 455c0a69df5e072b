"""The guides tell the truth: what they say to type is run, and gives what they show."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import conversion_mapping

from tests.guide_samples import LARGE, SMALL, SMALL_DENSE, write_headers, write_whole
from tests.guides import Block, blocks_of, commands_of, missing_from
from umem import cli
from umem.checkpoint import readers

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "how-it-works.md",
]
READER_GUIDE = ROOT / "docs" / "guides" / "add-a-reader.md"
MACHINES = {"spark": "spark_fresh", "spark-in-pieces": "spark_fragmented", "card": "rtx_5090_hmm"}


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and snapshots of machines."""
    directory = tmp_path_factory.mktemp("samples")
    write_whole(directory / "model", SMALL)
    write_whole(directory / "dense", SMALL_DENSE)
    write_headers(directory / "Qwen3-30B-A3B", LARGE)
    for name, platform in MACHINES.items():
        shutil.copy(ROOT / "tests" / "platforms" / f"{platform}.json", directory / f"{name}.json")
    return directory


@pytest.fixture
def desk(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the samples in it, where the guide is followed."""
    for sample in samples.iterdir():
        (tmp_path / sample.name).symlink_to(sample)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for registry, name in ((readers, "READERS"), (conversion_mapping, "_checkpoint_conversion_mapping_cache")):
        monkeypatch.setattr(registry, name, copy(getattr(registry, name)))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_guide_shows(page: Path, desk: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    printed: str | None = None
    blocks = blocks_of(page)
    assert page.read_text().count("```") == 2 * len(blocks)
    for block in blocks:
        if block.not_run:
            continue
        where = f"{page.name}:{block.line}"
        if block.language == "console":
            run_session(block, where)
        elif block.language == "python":
            printed = run_python(block, where, names)
        elif block.language == "text" and printed is not None:
            check(printed, block.text, block, where)
            printed = None
        else:
            pytest.fail(f"{where}: a block that cannot be run ({block.language}), and does not say so")


def test_the_reader_of_the_guide_keeps_the_contract(tmp_path: Path) -> None:
    """Its code is registered as a reader, and the suite that every reader must pass is run on it."""
    code = "\n".join(block.text for block in blocks_of(READER_GUIDE) if block.language == "python")
    (tmp_path / "guide_reader.py").write_text(code)
    paths = [str(ROOT), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "guide_reader", "-k", "plain", "tests/checkpoint/test_readers.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def run_session(block: Block, where: str) -> None:
    """Run the commands of a console block; one that fails must be followed by `echo $?`."""
    commands = commands_of(block.text)
    status = 0
    for command, following in zip(commands, [*commands[1:], None], strict=True):
        if command.line == "echo $?":
            assert command.shown == str(status), f"{where}: the exit status is {status}"
            continue
        status, output = run(command.line)
        asks = following is not None and following.line == "echo $?"
        assert status == 0 or asks, f"{where}: {command.line} gave {status}:\n{output}"
        check(output, command.shown, block, where)


def check(output: str, shown: str, block: Block, where: str) -> None:
    missing = missing_from(output, shown, figures_vary=block.figures_vary)
    assert not missing, f"{where}: {missing!r} is not in:\n{output}"


def run(line: str) -> tuple[int, str]:
    """Run a command, umem's own in this process; its exit status, and what it said on both streams."""
    words = shlex.split(line)
    if words[0] != "umem":
        done = subprocess.run(
            line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.returncode, done.stdout
    with pytest.MonkeyPatch.context() as patch, captured() as output:
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0), output.getvalue()


def run_python(block: Block, where: str, names: dict[str, Any]) -> str:
    """Run a block of Python; what it printed."""
    with captured() as output:
        exec(compile("\n" * block.line + block.text, where, "exec"), names)
    return output.getvalue()


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output
