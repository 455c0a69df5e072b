"""Measurement: loads in fresh processes, from page caches that are counted, beside others.

`fresh` starts and judges the processes, `meter` counts inside them, `sampling` watches them from outside. On these
stands `ttff`, with the loaders that it compares in `baselines`; `table` and `page` show what it found. The scripts
that measure other things stand on the same parts. Imports nothing here, so that a measured process has little to read.
"""
