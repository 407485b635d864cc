"""Benchmarks that ship with AENV: what a client waits for, against the least the same machine could do, in one run.

Nothing here is imported by a node. A benchmark starts what it measures and leaves nothing behind.
"""
