"""The lifecycle of a sandbox as a pure transition table. No I/O, no clock."""
