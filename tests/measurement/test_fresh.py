"""Measured processes: what they are asked and say, how they end, and what is watched from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from umem.errors import RunFailedError
from umem.measurement.fresh import run_fresh, shuffled
from umem.measurement.page_cache import cached_fraction, is_as_wanted, prepare_cache
from umem.measurement.sampling import ProcessSample, ProcessWatch, series_of

MIB = 1 << 20


def program(directory: Path, code: str) -> list[str]:
    path = directory / "program.py"
    path.write_text(f"import json, sys, time\nrequest = json.loads(sys.argv[2])\n{code}\n")
    return [str(path)]


def test_the_last_line_is_the_answer(tmp_path: Path) -> None:
    code = "print('by the way'); print(json.dumps({'twice': 2 * request['number'], 'started_s': request['started_s']}))"
    facts = run_fresh(program(tmp_path, code), {"number": 21})
    assert facts["twice"] == 42
    assert facts["started_s"] > 0


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    cases = [
        ("raise ValueError('of all things')", None, "ValueError: of all things"),
        ("sys.exit(3)", None, "exit status 3"),
        ("raise ValueError('too large\\n  what to do')", None, "^ValueError: too large$"),
        ("import os; os.kill(os.getpid(), 9)", None, "memory is out"),
        ("time.sleep(60)", 0.5, "not done after"),
    ]
    for code, timeout_s, message in cases:
        with pytest.raises(RunFailedError, match=message):
            run_fresh(program(tmp_path, code), {}, timeout_s=timeout_s)


def test_rounds_change_what_comes_first_and_what_comes_after_what() -> None:
    rounds = [shuffled("abcd", number) for number in range(24)]
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert all(order == backwards[::-1] for order, backwards in zip(rounds[::2], rounds[1::2], strict=True))
    assert {order[0] for order in rounds} == set("abcd")
    assert {pair for order in rounds for pair in pairwise(order)} == set(permutations("abcd", 2))
    assert shuffled("", 3) == []


def test_a_process_is_watched_by_kind_until_it_ends(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(8 * MIB))
    prepare_cache([data], "cold")
    code = (
        f"block = bytearray(b'x' * {64 * MIB})\n"
        f"whole = open({str(data)!r}, 'rb').read()\n"
        "time.sleep(0.5)\nprint('{}')"
    )
    watches: list[ProcessWatch] = []
    processes: list[int] = []

    @contextmanager
    def watch(process: int, started_s: float) -> Iterator[None]:
        processes.append(process)
        watches.append(ProcessWatch(process, started_s, [data]))
        with watches[-1]:
            yield

    run_fresh(program(tmp_path, code), {}, watch=watch)
    samples = watches[0].samples
    assert processes != [os.getpid()]
    assert max(sample.anonymous_bytes or 0 for sample in samples) >= 64 * MIB
    assert max(sample.page_cache_bytes or 0 for sample in samples) in (0, 8 * MIB)  # 0: the system cannot count
    assert samples[-1].minor_faults is not None
    assert samples[-1].minor_faults > 64 * MIB // (2 * MIB)
    assert [sample.time_s for sample in samples] == sorted(sample.time_s for sample in samples)
    assert watches[0].sample() is None  # it has ended


def test_what_a_system_does_not_tell_is_unknown(tmp_path: Path) -> None:
    process = tmp_path / "7"
    process.mkdir()
    (process / "status").write_text("Name:\tx\nVmPeak:\t 9 kB\nRssAnon:\t 12 kB\n")
    (process / "stat").write_text("7 (a (strange) name) S " + " ".join(str(number) for number in range(1, 30)))
    sample = ProcessWatch(7, 0.0, [], proc=tmp_path).sample()
    assert sample is not None
    assert (sample.anonymous_bytes, sample.file_bytes, sample.pressure_us) == (12 * 1024, None, None)
    assert (sample.available_bytes, sample.swap_used_bytes) == (None, None)
    assert (sample.minor_faults, sample.major_faults) == (7, 9)
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/memory").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=31\nfull avg10=0 total=5\n")
    again = ProcessWatch(7, 0.0, [], proc=tmp_path).sample()
    assert again is not None
    assert again.pressure_us == 31


def test_a_series_ends_with_what_is_measured() -> None:
    def at(time_s: float) -> ProcessSample:
        return ProcessSample(time_s, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)

    series = series_of([at(0.1), at(0.25), at(0.4)], 0.3)
    assert series["time_s"] == [0.1, 0.25]
    assert series["major_faults"] == [10, 10]


def test_files_are_brought_out_of_the_page_cache_and_into_it(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(8 * MIB))
    if cached_fraction([path]) is None:
        pytest.skip("the kernel does not have cachestat")
    prepare_cache([path], "cold")
    if cached_fraction([path]) != 0:
        pytest.skip("the file system does not evict")
    prepare_cache([path], "warm")
    assert cached_fraction([path]) == 1


def test_nearly_cold_is_cold_and_half_is_neither() -> None:
    assert is_as_wanted(0.001, "cold")
    assert is_as_wanted(0.999, "warm")
    assert not is_as_wanted(0.5, "cold")
    assert not is_as_wanted(0.5, "warm")
    assert is_as_wanted(None, "cold")
