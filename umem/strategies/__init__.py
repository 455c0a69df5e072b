"""Strategies: run a plan inside a window. Knows no frameworks and no names of models."""

from umem.strategies.executor import Execution, Outcome, Progress, execute

__all__ = ["Execution", "Outcome", "Progress", "execute"]
