"""UDP echo, for tests of the network: ``echo.py serve PORT`` and ``echo.py ask HOST PORT COUNT TIMEOUT_S``.

The server writes a line ``heard N`` for the N-th datagram. The client asks one question after another, and writes a
JSON list with the round-trip time of each in seconds: null where no answer came in time.
"""

from __future__ import annotations

import json
import socket
import sys
import time


def serve(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("0.0.0.0", port))
        print("ready", flush=True)
        heard = 0
        while True:
            data, sender = server.recvfrom(2048)
            heard += 1
            print(f"heard {heard}", flush=True)
            server.sendto(data, sender)


def ask(host: str, port: int, count: int, timeout_s: float) -> list[float | None]:
    times: list[float | None] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((host, port))
        for number in range(count):
            begin = time.monotonic()
            client.send(str(number).encode())
            times.append(_answered_s(client, number, begin, timeout_s))
    return times


def _answered_s(client: socket.socket, number: int, begin: float, timeout_s: float) -> float | None:
    """Return after what time the answer came; late answers to earlier questions are passed over."""
    while (left_s := begin + timeout_s - time.monotonic()) > 0:
        client.settimeout(left_s)
        try:
            if client.recv(2048) == str(number).encode():
                return time.monotonic() - begin
        except TimeoutError:
            break
    return None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", port]:
            serve(int(port))
        case ["ask", host, port, count, timeout_s]:
            print(json.dumps(ask(host, int(port), int(count), float(timeout_s))))
