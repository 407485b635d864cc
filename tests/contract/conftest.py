"""Conformance suites live in the package; their assertions are to explain themselves like those of tests."""

import pytest

pytest.register_assert_rewrite("aenv.testing.vmm_conformance")
