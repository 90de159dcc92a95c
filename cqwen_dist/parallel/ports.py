"""A port for the ranks' rendezvous (no torch: launching is instant)."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
