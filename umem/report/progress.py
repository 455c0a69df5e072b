"""Progress of a load as a tqdm bar, in terminals and notebooks. tqdm is imported when a bar is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umem.errors import MissingDependencyError

if TYPE_CHECKING:
    from umem.strategies import Progress

__all__ = ["TqdmProgress", "tqdm_progress"]


class TqdmProgress:
    """A progress callback that keeps a bar; one load after the other may use it.

    Parameters
    ----------
    bar_class
        `tqdm`, or a class like it.
    options
        Its arguments, above those that suit a load.
    """

    def __init__(self, bar_class: Any, **options: Any) -> None:
        self._bar_class = bar_class
        self._options = {"desc": "loading", "unit": "B", "unit_scale": True, "unit_divisor": 1024} | options
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        """Show how far the load is; the bar is closed when all is read."""
        if self._bar is None:
            self._bar = self._bar_class(total=progress.total_bytes, **self._options)
        self._bar.update(progress.read_bytes - self._bar.n)
        if progress.read_bytes >= progress.total_bytes:
            self.close()

    def close(self) -> None:
        """Close the bar, where a load ended before all was read."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def tqdm_progress(bar_class: Any = None, **options: Any) -> TqdmProgress:
    """A `progress=` callback that shows a tqdm bar: `umem.load(path, progress=umem.tqdm_progress())`.

    Parameters
    ----------
    bar_class
        A class like `tqdm`; None takes `tqdm.auto`, which suits terminals and notebooks.
    options
        Arguments of the bar: `desc`, `leave`, `disable`, `position`, ...

    Raises
    ------
    MissingDependencyError
        tqdm is not installed.
    """
    if bar_class is None:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise MissingDependencyError("a bar needs tqdm: pip install tqdm") from error
        bar_class = tqdm
    return TqdmProgress(bar_class, **options)
