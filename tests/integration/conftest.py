"""What the node's tests demand of a node explains itself like an assertion of a test."""

import pytest

pytest.register_assert_rewrite("tests.support.node_harness")
