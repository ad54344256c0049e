"""Messages between the lab's processes. Plain pickles: torch's own would share the memory of a process that ends."""

from __future__ import annotations

import pickle
import socket
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["SOCKET", "connect", "listen", "packed", "receive", "send"]

SOCKET = "/run/lab.sock"
"""A path, so that it is reached from every network namespace and puts no byte on a link."""


def send(connection: Connection, value: Any) -> None:
    """One message."""
    connection.send_bytes(pickle.dumps(value))


def receive(connection: Connection) -> Any:
    """The next message; EOFError where the other end is gone."""
    try:
        return pickle.loads(connection.recv_bytes())
    except ConnectionError as error:
        raise EOFError from error


def packed(value: Any) -> bytes:
    """A value that only the process which started the lab unpacks."""
    return pickle.dumps(value)


def listen() -> socket.socket:
    """Where ranks come to."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(SOCKET)
    server.listen(1024)
    return server


def connect(path: str) -> Connection:
    """To the lab's first process."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(path)
    return Connection(client.detach())
