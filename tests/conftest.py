"""A small text that is the same everywhere, for whatever trains in a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SENTENCE = "the stream runs over wide stones and the lane keeps every number in its place while rows sum to one"
WORDS = SENTENCE.split()


def pseudo_text(size: int, seed: int = 1) -> str:
    """Sentences from a linear congruential generator: the same on every machine and in every version."""
    state, parts, length = seed, [], 0
    while length < size:
        state = (state * 1103515245 + 12345) % 2**31
        word = WORDS[state // 65536 % len(WORDS)]
        parts.append(word + (".\n" if state // 65536 % 11 == 0 else " "))
        length += len(parts[-1])
    return "".join(parts)


LONG = (
    "test_triton_kernels.py",
    "test_levels_curves.py",
    "test_netlab.py",
    "test_parallel_curves.py",
    "test_hooks_ranks.py",
    "test_dropping_ranks.py",
    "test_bench_collectives.py",
    "test_reduce_ranks.py",
    "test_survive.py",
    "test_torchrun_train.py",
    "test_survive_ranks.py",
    "test_cpu_kernels.py",
    "test_train_resume.py",
    "test_train_loop.py",
    "test_build.py",
    "test_site_ops.py",
    "test_train_packed.py",
    "test_train_scheduled.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first: of several processes none then waits for the last file of another."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty kilobytes of text; token shards may go into the folder ``cache`` beside it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(pseudo_text(40_000), "utf-8")
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tests share the machine; one thread is also what makes sums come out the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
