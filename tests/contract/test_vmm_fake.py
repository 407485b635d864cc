"""The fake VMM does what every driver has to do."""

from collections.abc import Iterator

import pytest
from tests.support.vmm_harness import FakeHarness, open_directory

from aenv.testing.vmm_conformance import VmmConformance


class TestFakeDriver(VmmConformance):
    @pytest.fixture
    def harness(self) -> Iterator[FakeHarness]:
        with open_directory() as directory:
            yield FakeHarness(directory)
