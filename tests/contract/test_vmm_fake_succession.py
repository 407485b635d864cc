"""The fake VMM does what every driver has to do in the shape of QEMU, too."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.vmm_harness import FakeHarness, open_directory

from aenv.testing.fake_succession import FakeSuccessionDriver
from aenv.testing.vmm_conformance import VmmConformance
from aenv.vmm.contract import Driver


class SuccessionHarness(FakeHarness):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.driver: Driver = FakeSuccessionDriver(self.host)

    async def another_driver(self) -> Driver:
        return FakeSuccessionDriver(self.host)


class TestFakeSuccessionDriver(VmmConformance):
    @pytest.fixture
    def harness(self) -> Iterator[SuccessionHarness]:
        with open_directory() as directory:
            yield SuccessionHarness(directory)
