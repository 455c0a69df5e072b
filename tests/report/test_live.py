"""A running load as people see it: within 80 columns, with what is left, and each change of pace."""

from __future__ import annotations

import pytest
from rich.console import Console

from umem.probes import CgroupMemory, Level, MemorySnapshot, Rule, Sample, Verdict
from umem.report.live import change_line, live_table
from umem.settings import MIB
from umem.strategies import Progress

VERDICTS = (
    Verdict(11.5, Level.SOFT, Rule.REST, 40 * MIB, 48 * MIB, "the control group's headroom"),
    Verdict(13.25, Level.NORMAL, Rule.CALM, 90 * MIB, 56 * MIB, "MemAvailable"),
    Verdict(14.0, Level.SOFT, Rule.SWAP_OUT, 70 * MIB, 64 * MIB),
    Verdict(15.0, Level.HARD, Rule.PRESSURE, 0.3, 0.2),
)


def test_a_change_of_pace_is_one_line() -> None:
    lines = [change_line(verdict, 10.0) for verdict in VERDICTS]
    assert lines[0].startswith(
        "   1.50 s  slower: 40.00 MiB left of the control group's headroom once the load is whole"
    )
    assert lines[1].startswith("   3.25 s  full speed: 90.00 MiB left of MemAvailable")
    assert lines[2].endswith("slower: 70.00 MiB/s swapped out, the bound is 64.00 MiB/s")
    assert lines[3].endswith("stopped: all tasks stood still for memory 30 % of the time, the bound is 20 %")


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    memory = MemorySnapshot(
        time_s=15,
        available_bytes=2048 * MIB,
        anonymous_bytes=300 * MIB,
        swap_total_bytes=512 * MIB,
        swap_free_bytes=500 * MIB,
        pressure_full_percent=1.5,
        cgroups=(CgroupMemory("/g", 1024 * MIB, 900 * MIB),),
    )
    progress = Progress(512 * MIB, 1024 * MIB, 2.0, 16 * MIB, "", Sample(memory, 3 * MIB), VERDICTS)
    Console(width=80).print(live_table(progress, 10.0))
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    for part in (
        "512.00 MiB of 1.00 GiB at 256.00 MiB/s",
        "stopped",
        "2.00 GiB available",
        "124.00 MiB in the control",
    ):
        assert part in printed
    assert "12.00 MiB of 512.00 MiB in use" in printed
