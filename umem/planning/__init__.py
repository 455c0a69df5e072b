"""Planning: from names, shapes and byte ranges to a plan. Pure: no torch storage, no I/O, no knowledge of machines."""

from umem.planning.budget import Allowance, Budget, LargeBlocks, Limit, MemorySupply, Needs, Shortfall, budget_from
from umem.planning.plan import Forecast, LoadPlan, make_plan
from umem.planning.remedies import Circumstances, check_budget
from umem.planning.targets import Place, Target, Targets, places_of, targets_of
from umem.planning.views import View
from umem.planning.writes import Adaptation, Conversion, Group, Route, Write

__all__ = [
    "Adaptation",
    "Allowance",
    "Budget",
    "Circumstances",
    "Conversion",
    "Forecast",
    "Group",
    "LargeBlocks",
    "Limit",
    "LoadPlan",
    "MemorySupply",
    "Needs",
    "Place",
    "Route",
    "Shortfall",
    "Target",
    "Targets",
    "View",
    "Write",
    "budget_from",
    "check_budget",
    "make_plan",
    "places_of",
    "targets_of",
]
