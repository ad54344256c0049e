"""A refactor keeps the losses: bit for bit on the machine that wrote them down, to rounding on any other."""

from __future__ import annotations

import dataclasses
import json

import pytest

import golden
from golden import FILE, RESIDUALS, fingerprint, losses

TOLERANCE = 1e-4  # ten steps carry the rounding of a sum no further than that
STORED = json.loads(FILE.read_text("utf-8"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("golden")
    return {name: losses(name, folder) for name in RESIDUALS}


@pytest.mark.parametrize("residual", RESIDUALS)
def test_the_losses_are_those_written_down(found, residual):
    expected = STORED["losses"][residual]
    assert len(expected) == 11
    if fingerprint() == STORED["machine"]:
        assert found[residual] == expected
    else:
        assert found[residual] == pytest.approx(expected, rel=TOLERANCE)


def test_the_written_losses_tell_the_residuals_apart():
    """All begin as the same function (HC sums its streams, so it alone differs), and each learns in its own way."""
    residual, hc, mhc = (STORED["losses"][name] for name in RESIDUALS)
    assert mhc[0] == pytest.approx(residual[0], abs=1e-5)
    assert len({residual[-1], hc[-1], mhc[-1]}) == 3
    assert all(curve[9] < curve[0] - 0.5 for curve in (residual, hc, mhc))


def test_three_percent_more_of_the_learning_rate_would_show(tmp_path, found, monkeypatch):
    """The tolerance for other machines is tight enough to notice a change of the arithmetic."""
    original = golden.config

    def shifted(residual: str, cache: str):
        config = original(residual, cache)
        return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=config.optimizer.lr * 1.03))

    monkeypatch.setattr(golden, "config", shifted)
    assert losses("mhc", tmp_path) != pytest.approx(found["mhc"], rel=TOLERANCE)
