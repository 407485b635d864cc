"""What the control plane tells Prometheus: the node's sandboxes, and the requests it answered."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aenv.node.service import NodeService

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """A registry of its own, so that two nodes in one process do not share one."""

    def __init__(self, node: NodeService) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Node(node))
        self._requests = Counter(
            "aenv_api_requests", "Requests answered.", ["operation", "status"], registry=self._registry
        )
        self._duration = Histogram(
            "aenv_api_request_duration_seconds",
            "Time from request to answer.",
            ["operation"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )

    def observe(self, operation: str, status: int, duration_s: float) -> None:
        self._requests.labels(operation, str(status)).inc()
        self._duration.labels(operation).observe(duration_s)

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _Node(Collector):
    def __init__(self, node: NodeService) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        stats = self._node.stats()
        sandboxes = GaugeMetricFamily("aenv_sandboxes", "Sandboxes of this node.", labels=["state"])
        for state, number in (("running", stats.running), ("paused", stats.paused), ("starting", stats.starting)):
            sandboxes.add_metric([state], number)
        yield sandboxes
        yield GaugeMetricFamily("aenv_warm_machines", "Machines of the warm pool that are ready.", value=stats.warm)
        yield CounterMetricFamily("aenv_creates", "Sandboxes created.", value=stats.creates)
        yield CounterMetricFamily("aenv_create_failures", "Creations that failed.", value=stats.create_failures)
