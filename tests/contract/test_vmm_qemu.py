"""QEMU with real guests does what every driver has to do."""

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support.vmm_harness import QemuBench, QemuHarness, open_directory

from aenv.testing.vmm_conformance import VmmConformance

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def bench() -> Iterator[QemuBench]:
    with open_directory() as directory:
        yield QemuBench(directory)


@pytest.fixture
async def harness(bench: QemuBench) -> AsyncIterator[QemuHarness]:
    driver, source = await bench.prepare()
    with open_directory() as directory:
        harness = QemuHarness(directory, bench, driver, source)
        try:
            await harness.base()
            yield harness
        finally:
            harness.close()


class TestQemuDriver(VmmConformance):
    pass
