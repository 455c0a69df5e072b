"""The load benchmark: that its figures are of equal loads from caches that were as it says; never how fast they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import bench_load
import load_tables
import sweeps
from loaders import LOADERS
from raw_reads import MIB, RawRead
from smallest_memory import STEP_BYTES, smallest_memory

from tests.adapters.hosts.models import save_family
from umem.errors import RunFailedError
from umem.measurement import cgroups
from umem.measurement.fresh import run_checked
from umem.measurement.page_cache import cached_fraction, prepare_cache, shards_of

pytestmark = pytest.mark.slow

NAMES = ("umem-load", "transformers", "umem-load-into", "safetensors-mmap", "safetensors-pread")
READS = (RawRead(direct=False, threads=2, block_bytes=MIB), RawRead(direct=False, threads=1, block_bytes=4 * MIB))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A dense model and one with experts, on a file system whose pages can be counted and evicted."""
    directory = tmp_path_factory.mktemp("bench")
    made = [save_family(directory / family, family) for family in ("qwen3", "qwen3_moe")]
    if cached_fraction(shards_of(made[0])) is None:
        pytest.skip("the kernel does not have cachestat")
    prepare_cache(shards_of(made[0]), "cold")
    if cached_fraction(shards_of(made[0])) != 0:
        pytest.skip("the file system does not evict")
    return made


@pytest.fixture(scope="module")
def result(checkpoints: list[Path]) -> dict[str, Any]:
    """One round of both caches, of the dense model."""
    return measured(checkpoints[0], NAMES, ["cold", "warm"])


def measured(checkpoint: Path, names: Sequence[str], caches: Sequence[str]) -> dict[str, Any]:
    loaders = [loader for loader in LOADERS if loader.name in names]
    found = bench_load.measure([checkpoint], loaders, caches, 1, configurations=READS)
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def runs_of(result: dict[str, Any], **wanted: str) -> list[dict[str, Any]]:
    return [
        facts
        for series in result["series"]
        if all(series[name] == value for name, value in wanted.items())
        for facts in series["runs"]
    ]


def test_every_loader_and_plain_read_ran_on_both_caches(result: dict[str, Any]) -> None:
    # Of each kind of plain read, the best one with that cache is also run into memory that was touched before.
    names = {*NAMES, *(read.label for read in READS)}
    for cache in ("cold", "warm"):
        touched = [s["loader"] for s in result["series"] if s["cache"] == cache and s["loader"].endswith(" touched")]
        assert len(touched) == 1
        for name in names:
            (facts,) = runs_of(result, cache=cache, loader=name)
            assert facts["load_s"] > 0
            assert facts["round"] == 0
    assert result["left_out"] == {}


def test_caches_were_as_they_are_called(result: dict[str, Any]) -> None:
    assert all(facts["cached_fraction"] < 0.01 for facts in runs_of(result, cache="cold"))
    assert all(facts["cached_fraction"] > 0.99 for facts in runs_of(result, cache="warm"))
    (left,) = runs_of(result, cache="cold", loader="safetensors-pread")
    assert left["cached_after_bytes"] > 0


def digests_of(result: dict[str, Any]) -> dict[str, set[str]]:
    return {name: {facts["digest"] for facts in runs_of(result, loader=name)} for name in result["loaders"]}


def test_all_loads_are_equal(result: dict[str, Any]) -> None:
    assert result["equal"]
    assert len(set.union(*digests_of(result).values())) == 1


def test_merged_experts_are_another_end_state_than_stored_tensors(checkpoints: list[Path]) -> None:
    result = measured(checkpoints[1], ("umem-load", "transformers", "accelerate", "umem-load-into"), ["cold"])
    digests = digests_of(result)
    assert result["equal"]
    assert digests["umem-load"] == digests["transformers"]
    assert not digests["umem-load"] & digests["umem-load-into"]
    assert result["left_out"] == {"accelerate on qwen3_moe": "it does not merge experts"}


def test_another_digest_or_a_mapped_tensor_is_not_equal(result: dict[str, Any]) -> None:
    for name, value in (("digest", "another"), ("mapped_bytes", 1)):
        changed = json.loads(json.dumps(result))
        runs_of(changed, cache="warm", loader="safetensors-pread")[0][name] = value
        assert not load_tables.equal(changed)


def test_rows_hold_medians_and_ratios_within_a_round(result: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(result))
    for series in changed["series"]:
        (only,) = series["runs"]
        raw = series.get("raw")
        seconds = (1.0, 2.0, 4.0) if raw is None or raw["touched"] else (2.0, 0.5, 1.0)
        factor = 3.0 if series["loader"] == "transformers" else 1.0
        series["runs"] = [only | {"round": number, "load_s": factor * s} for number, s in enumerate(seconds)]
    rows = {(row["checkpoint"], row["cache"], row["loader"]): row for row in load_tables.rows(changed)}
    umem, transformers = (rows["qwen3", "cold", name] for name in ("umem-load", "transformers"))
    assert (umem["load_s"], umem["fastest_s"], umem["slowest_s"]) == (2.0, 1.0, 4.0)
    assert umem["to_raw"] == 4.0  # of 0.5, 4 and 4: each run against the plain read of its round
    assert (umem["to_umem"], transformers["to_umem"]) == (1.0, 3.0)
    page = load_tables.markdown(changed)
    assert page.count("| cold | umem-load |") == 1
    assert "bit-equal, none left in mapped files: yes" in page


def test_a_run_that_did_not_begin_as_wanted_is_rejected(checkpoints: list[Path], monkeypatch: Any) -> None:
    monkeypatch.setattr("umem.measurement.fresh.prepare_cache", lambda files, _cache: prepare_cache(files, "warm"))
    request = {"raw": bench_load.raw_facts(READS[0])}
    facts, rejected = run_checked([bench_load.__file__], request, files=shards_of(checkpoints[0]), cache="cold")
    assert facts is None
    assert rejected == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("needed_mib", [200, 208, 330, 700])
def test_the_smallest_memory_is_found_to_a_step(needed_mib: int) -> None:
    def run(limit_bytes: int | None, timeout_s: float | None) -> dict[str, Any]:
        if limit_bytes is not None and limit_bytes < needed_mib * MIB:
            raise RunFailedError(f"needs {needed_mib} MiB")
        return {"load_s": 1.0 if timeout_s is None else 2.0, "base_bytes": 90 * MIB, "peak_bytes": 310 * MIB}

    found = smallest_memory(run, 101 * MIB, 2)
    assert needed_mib * MIB <= found["limit_bytes"] < needed_mib * MIB + STEP_BYTES
    assert (found["beyond_base_bytes"], found["to_unlimited"]) == (found["limit_bytes"] - 90 * MIB, 2.0)
    assert found["failure_below"] == f"needs {needed_mib} MiB"


@pytest.mark.root
def test_a_limit_holds_for_the_load(tmp_path: Path) -> None:
    size = 256 * MIB
    directory = sweeps.sweep_shards(tmp_path, size)[0]
    loader = next(loader for loader in LOADERS if loader.name == "safetensors-pread")
    run = bench_load.limited_run(loader, directory, tmp_path)
    free = run(None, None)
    enough = free["base_bytes"] + size + 64 * MIB
    limited = run(enough, 60)
    assert limited["base_bytes"] + limited["peak_bytes"] <= enough < free["base_bytes"] + free["peak_bytes"]
    with pytest.raises(RunFailedError, match="memory is out"):
        run(size, 60)


def test_an_interrupt_leaves_no_process_and_no_cgroup(checkpoints: list[Path]) -> None:
    command = [sys.executable, bench_load.__file__, str(checkpoints[0]), "--only", "umem"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (children := children_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    _, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints.splitlines()[-1]) == (130, "interrupted; nothing is left running")
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list(cgroups.ROOT.glob(f"**/umem-measure-{process.pid}-*"))


def test_no_checkpoint_says_how_to_write_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, bench_load.__file__, str(tmp_path / "none")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"scripts/sample_checkpoint.py {tmp_path / 'none'} --kind" in done.stderr


@pytest.mark.parametrize(("sweep", "count"), [("sizes", 4), ("shards", 2)])
def test_swept_checkpoints_have_equal_totals(tmp_path: Path, sweep: str, count: int) -> None:
    made = sweeps.SWEEPS[sweep](tmp_path, 4 * MIB)
    assert len({path.name for path in made}) == count
    assert [sum(path.stat().st_size for path in shards_of(one)) // MIB for one in made] == [4] * count
    if sweep == "shards":
        assert [len(shards_of(one)) for one in made] == [1, 32]


def children_of(process: int) -> list[int]:
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]
