"""Reports: what a load did, as data and JSON (`model`), as a table (`table`), as a picture (`chart`), and in notebooks.

Importing this registers how plans, reports and machines show themselves; what renders is imported when they do.
"""

from typing import Any

from umem._display import display_as
from umem.machine import MachineSnapshot
from umem.planning import LoadPlan
from umem.report.model import PHASES, LoadReport, Peaks, Stopwatch

__all__ = ["PHASES", "LoadReport", "Peaks", "Stopwatch"]


def _plan_table(plan: LoadPlan) -> Any:
    from umem.report.table import plan_table

    return plan_table(plan)


def _plan_html(plan: LoadPlan) -> str:
    from umem.report.notebook import notebook_html

    return notebook_html(_plan_table(plan))


def _report_table(report: LoadReport) -> Any:
    from umem.report.table import report_table

    return report_table(report)


def _report_html(report: LoadReport) -> str:
    from umem.report.chart import memory_chart
    from umem.report.notebook import notebook_html

    return notebook_html(_report_table(report), memory_chart(report))


def _machine_table(machine: MachineSnapshot) -> Any:
    from umem.report.table import machine_table

    return machine_table(machine)


def _machine_html(machine: MachineSnapshot) -> str:
    from umem.report.notebook import notebook_html

    return notebook_html(_machine_table(machine))


display_as(LoadPlan, terminal=_plan_table, notebook=_plan_html)
display_as(LoadReport, terminal=_report_table, notebook=_report_html)
display_as(MachineSnapshot, terminal=_machine_table, notebook=_machine_html)
