"""The network lab for tests: the fixture ``lab``, and bounds that hold on a loaded machine.

Where no lab can be made a test skips with one line that says what is missing; with LANEWAY_NETLAB_REQUIRED=1 it fails instead.
Bodies belong in a module of their own that imports only what ranks need (``netlab_bodies.py``). Assert bytes and values; of times
only that a link is never faster than its rate.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from laneway.bench import netlab
from laneway.bench.netlab.torchrun import run_torchrun

HEADERS = 1.02
"""TCP and IP headers, acknowledgements, and the messages by which gloo announces buffers."""
EXTRA = 8192


class Lab:
    """`netlab.run` and `run_torchrun`."""

    run: Callable[..., list[Any]] = staticmethod(netlab.run)
    torchrun: Callable[..., Any] = staticmethod(run_torchrun)


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The lab, or a skip."""
    require()
    return Lab()


def require() -> None:
    """Skip, or fail where labs are required, if none can be made."""
    try:
        netlab.available()
    except netlab.Unavailable as missing:
        if os.environ.get("LANEWAY_NETLAB_REQUIRED") == "1":
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))


def assert_bytes(counted: int, payload: float) -> None:
    """A link carried ``payload`` bytes and nothing else but headers."""
    assert 0.999 * payload <= counted <= HEADERS * payload + EXTRA, f"{counted} bytes counted, {payload:.0f} expected"
