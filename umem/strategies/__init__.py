"""Strategies: run a plan inside a window. Knows no frameworks and no names of models."""

from umem.strategies.execution import Execution, Outcome, Progress
from umem.strategies.executor import execute

__all__ = ["Execution", "Outcome", "Progress", "execute"]
