"""Adapters: what a checkpoint's tensors mean to a model. Layouts, names, and the host frameworks under `hosts`."""
