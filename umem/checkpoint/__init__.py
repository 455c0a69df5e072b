"""Storage: what a checkpoint's files hold and how their bytes are read. Knows no models, no devices, no torch."""

from umem.checkpoint.entries import Checkpoint, Entry, Shard
from umem.checkpoint.source import open_checkpoint, open_files

__all__ = ["Checkpoint", "Entry", "Shard", "open_checkpoint", "open_files"]
