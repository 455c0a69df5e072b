"""Planning: from names, shapes and byte ranges to a plan. Pure: no torch storage, no I/O, no knowledge of machines."""

from umem.planning.budget import Budget, budget_from, check_budget, shortfall
from umem.planning.plan import Forecast, LoadPlan, make_plan
from umem.planning.targets import Target, Targets, targets_of_module
from umem.planning.views import View
from umem.planning.writes import Adaptation, Conversion, Group, Route, Write

__all__ = [
    "Adaptation",
    "Budget",
    "Conversion",
    "Forecast",
    "Group",
    "LoadPlan",
    "Route",
    "Target",
    "Targets",
    "View",
    "Write",
    "budget_from",
    "check_budget",
    "make_plan",
    "shortfall",
    "targets_of_module",
]
