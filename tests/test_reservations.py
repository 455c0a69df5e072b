"""Claims of loads on one machine: seen by others, gone with their process, harmless where they cannot be made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from umem.reservations import Claim, Reservations, runtime_directory

HOLD = """
import os, sys
from pathlib import Path
from umem.reservations import Claim, Reservations
held = Reservations(Path(sys.argv[1])).reserve(Claim(memory_bytes=7, group="g", device_bytes={"bus": 3}))
if "fork" in sys.argv and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


def holder(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_claim_is_seen_shrinks_and_ends(tmp_path: Path) -> None:
    mine, others = Reservations(tmp_path), Reservations(tmp_path)
    held = mine.reserve(Claim(memory_bytes=100, group="a", device_bytes={"bus": 50}))
    assert held is not None
    assert others.others() == [Claim(memory_bytes=100, group="a", device_bytes={"bus": 50})]
    second = mine.reserve(Claim(memory_bytes=1))
    assert second is not None
    held.shrink(Claim(memory_bytes=10))
    assert sorted(claim.memory_bytes for claim in others.others()) == [1, 10]
    held.release()
    held.release()
    second.release()
    assert others.others() == []
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("fork", [(), ("fork",)], ids=["alone", "with a child that lives on"])
def test_a_claim_ends_with_its_process(tmp_path: Path, fork: tuple[str, ...]) -> None:
    process = holder(tmp_path, *fork)
    reservations = Reservations(tmp_path)
    assert [claim.memory_bytes for claim in reservations.others()] == [7]
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert reservations.others() == []
    assert not list(tmp_path.glob("*.json"))
    assert process.stdin is not None
    process.stdin.close()
    assert process.stdout is not None
    process.stdout.close()


def test_a_process_number_that_came_again_is_another_process(tmp_path: Path) -> None:
    held = Reservations(tmp_path).reserve(Claim(memory_bytes=5))
    assert held is not None
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"started": record["started"] - 1}))
    assert Reservations(tmp_path).others() == []
    held.release()


def test_a_process_that_cannot_be_seen_counts_as_long_as_it_holds_its_lock(tmp_path: Path) -> None:
    held = Reservations(tmp_path).reserve(Claim(memory_bytes=5))
    assert held is not None
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"pid_namespace": "pid:[1]", "pid": 1 << 30}))
    assert [claim.memory_bytes for claim in Reservations(tmp_path).others()] == [5]
    held.release()


def test_nonsense_in_the_directory_is_no_claim(tmp_path: Path) -> None:
    (tmp_path / "1-0.json").write_text("nonsense")
    (tmp_path / "2-0.json").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "3-0.json").mkdir()
    assert Reservations(tmp_path).others() == []


def test_without_a_place_nothing_is_known_and_nothing_fails(tmp_path: Path) -> None:
    for directory in (None, tmp_path / "none"):
        reservations = Reservations(directory)
        with reservations.exclusive():
            assert reservations.others() == []
            assert reservations.reserve(Claim(memory_bytes=1)) is None


def test_the_directory_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = tmp_path / f"umem-{os.getuid()}"
    assert runtime_directory() == shared
    assert shared.stat().st_mode & 0o777 == 0o700
    (tmp_path / "run").mkdir()
    assert runtime_directory() == tmp_path / "run/umem"
    (tmp_path / "run/umem").chmod(0o777)  # anybody could put claims there
    assert runtime_directory() == shared
    shared.rmdir()
    shared.symlink_to(tmp_path / "run")
    assert runtime_directory() is None


def test_one_load_at_a_time_decides(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom umem.reservations import Reservations\n"
        "with Reservations(Path(sys.argv[1])).exclusive():\n    print('in', flush=True)\n"
    )
    with Reservations(tmp_path).exclusive():
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
    out, _ = process.communicate(timeout=30)
    assert out == "in\n"
