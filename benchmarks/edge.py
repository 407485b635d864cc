"""What edge costs: a tiny request and a large body, through it and directly, in turn in one run.

    python benchmarks/edge.py [PROGRAM]

Prints a table and, as the last line, the same as JSON. Server, edge and client share the machine, so on few
cores the figures are worst cases.
"""

import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from aenv_native import program

REQUESTS = 5000
WARM_UP = 500
BODY_BYTES = 1 << 30
ROUNDS = 3
ADDRESS = "127.1.0.1"
BLOCK = bytes(1 << 20)


def serve(listener: socket.socket) -> None:
    """One connection a process: a blocking server, as fast as the kernel."""
    while True:
        connection, _ = listener.accept()
        process = multiprocessing.Process(target=answer, args=(connection,), daemon=False)
        process.start()
        connection.close()


def answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(1 << 16):
        if request.startswith(b"GET /large"):
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % BODY_BYTES)
            for _ in range(BODY_BYTES // len(BLOCK)):
                connection.sendall(BLOCK)
        else:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


class Client:
    def __init__(self, address: tuple[str, int], port: int) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.routing = f"Host: h\r\nE2b-Sandbox-Id: ibench\r\nE2b-Sandbox-Port: {port}\r\n\r\n".encode()

    def small(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        self.socket.sendall(b"GET / HTTP/1.1\r\n" + self.routing)
        data = b""
        while not data.endswith(b"\r\n\r\nok"):
            data += self.socket.recv(4096)
        return time.perf_counter() - began

    def large(self) -> float:
        """Bytes a second."""
        buffer = bytearray(1 << 20)
        began = time.perf_counter()
        self.socket.sendall(b"GET /large HTTP/1.1\r\n" + self.routing)
        got = 0
        while got < BODY_BYTES:
            got += self.socket.recv_into(buffer)
        return got / (time.perf_counter() - began)


def measure(direct: Client, through: Client) -> dict[str, dict[str, float]]:
    ways = {"direct": direct, "through edge": through}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(WARM_UP + REQUESTS):
        for way, client in ways.items():
            took = client.small()
            if number >= WARM_UP:
                times[way].append(took)
    rates = {way: statistics.median(client.large() for _ in range(ROUNDS)) for way, client in ways.items()}
    result = {}
    for way in ways:
        cuts = statistics.quantiles(times[way], n=100)
        result[way] = {"p50_us": cuts[49] * 1e6, "p95_us": cuts[94] * 1e6, "mib_per_s": rates[way] / (1 << 20)}
    return result


def main() -> None:
    executable = sys.argv[1] if len(sys.argv) > 1 else str(program("edge"))
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    server = multiprocessing.Process(target=serve, args=(listener,))
    server.start()
    with tempfile.TemporaryDirectory(prefix="edge-", dir="/tmp") as name:
        admin = Path(name, "admin")
        command = [executable, "--listen", "127.0.0.1:0", "--control", f"{name}/control", "--admin", str(admin)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as edge:
            try:
                assert edge.stdout is not None
                host, _, edge_port = edge.stdout.readline().split()[1].rpartition(":")
                route = {"generation": 1, "state": "running", "address": ADDRESS, "envd_port": 49983}
                with httpx.Client(transport=httpx.HTTPTransport(uds=str(admin))) as client:
                    client.put("http://edge/routes/ibench", json=route).raise_for_status()
                result = measure(Client((ADDRESS, port), port), Client((host, int(edge_port)), port))
                status = Path(f"/proc/{edge.pid}/status").read_text()
                resident_mib = int(status.split("VmHWM:")[1].split()[0]) / 1024
            finally:
                edge.terminate()
                server.terminate()
    print(f"{'':14}{'p50 us':>10}{'p95 us':>10}{'MiB/s':>10}")
    for way, row in result.items():
        print(f"{way:14}{row['p50_us']:>10.0f}{row['p95_us']:>10.0f}{row['mib_per_s']:>10.0f}")
    print(f"edge's most resident memory: {resident_mib:.1f} MiB")
    print(json.dumps(result | {"resident_mib": resident_mib}))


if __name__ == "__main__":
    main()
