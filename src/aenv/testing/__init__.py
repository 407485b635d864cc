"""Fakes and conformance suites, importable by tests and by drivers outside this repository."""
