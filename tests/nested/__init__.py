"""A virtual machine that has what hosts may lack, for tests: KVM, ublk, nbd and a recent kernel, emulated.

It runs a command of this host: its root file system is the host's, shared read-only under a scratch disk, so the
checkout, its Python environment and every program are there at the same paths. Slow (several times slower than
the host, and guests under its KVM again), but real.

    python -m tests.nested run -- COMMAND

Nothing here is used by an installed AENV.
"""
