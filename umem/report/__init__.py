"""Reports: what a load did, as data and JSON (`model`), as a table (`table`), as a picture (`chart`)."""

from umem.report.model import PHASES, LoadReport, Peaks, Stopwatch

__all__ = ["PHASES", "LoadReport", "Peaks", "Stopwatch"]
