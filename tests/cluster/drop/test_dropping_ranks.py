"""Dropping between real gloo ranks: nothing is lost, replicas agree, bytes are those planned, and a bad value spoils one step."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import dropping_ranks
import pytest
import torch
from dropping_ranks import CASES, WORLD, gradient, layout

from laneway.cluster.drop.sizes import drop_for_saving, exchange_bytes, message_format, parts

pytestmark = pytest.mark.distributed
SEED = random.randrange(10**6)
WHOLE = [name for name, case in CASES.items() if not case.spoiled and case.options.get("feedback", True) and case.kind != "large"]
EXACT = [name for name in WHOLE if CASES[name].options.get("residual") != "fp32"]
ROUNDED = [name for name in WHOLE if CASES[name].options.get("residual") == "fp32"]
SPOILED = [name for name, case in CASES.items() if case.spoiled]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("dropping")
    command = [sys.executable, str(Path(dropping_ranks.__file__)), str(folder), str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


def given(name: str, steps: int) -> torch.Tensor:
    """Σ of all gradients of the first steps, fp64."""
    case = CASES[name]
    return sum(
        (gradient(case, rank, step, SEED).double() for rank in range(case.members) for step in range(steps)),
        torch.zeros(case.entries).double(),
    )


def accounted(ranks: list[dict], name: str, steps: int) -> torch.Tensor:
    """Σ of results and of what the ranks still hold, fp64."""
    left = sum((ranks[rank][name]["residuals"][steps - 1] for rank in range(CASES[name].members)), torch.zeros(1).double())
    return left + sum(result.double() for result in ranks[0][name]["results"][:steps])


@pytest.mark.parametrize("name", EXACT)
def test_sent_and_kept_are_the_gradients_bit_for_bit(ranks, name):
    for steps in range(1, CASES[name].steps + 1):
        assert torch.equal(accounted(ranks, name, steps), given(name, steps)), f"seed {SEED}, step {steps}"


@pytest.mark.parametrize("name", ROUNDED)
def test_residuals_in_fp32_round_once_an_addition(ranks, name):
    case = CASES[name]
    largest = 2.0**8 * case.steps * case.members
    bound = case.steps * (case.members + 1) * largest * 2.0**-24
    assert (accounted(ranks, name, case.steps) - given(name, case.steps)).abs().max() <= bound


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_same_bits_on_all_members(ranks, name):
    first = ranks[0][name]["results"]
    for rank in range(1, CASES[name].members):
        for one, other in zip(first, ranks[rank][name]["results"], strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_planned_in_every_step(ranks, name):
    """Whatever the values: bursts, zeros and bad numbers change nothing."""
    for rank in range(CASES[name].members):
        found = ranks[rank][name]
        assert found["sent"][0] == found["planned"][0]
        if not CASES[name].options.get("warmup"):
            assert set(found["sent"]) == {found["planned"][0]}


def test_forty_percent_fewer_bytes_and_no_more_entries_than_planned(ranks):
    for wire in ("fp32", "bf16", "int8"):
        share = drop_for_saving(0.40, wire)
        sent, dense = exchange_bytes(1 << 20, 4, 1, share, wire), exchange_bytes(1 << 20, 4, 1, 0.0, wire)
        assert sent == pytest.approx(0.60 * dense, rel=1e-4)
    name = next(name for name, case in CASES.items() if case.options.get("drop") == 0.44 and case.entries == 4000)
    case = CASES[name]
    forms = [message_format(stop - start, 0.44, case.options["wire"]) for start, stop in parts(4000, case.members)]
    for result in ranks[0][name]["results"]:
        assert 0.45 * 4000 < result.count_nonzero() <= sum(form.kept for form in forms)


def test_alone_nothing_is_dropped_or_sent(ranks):
    found = ranks[0]["alone"]
    assert found["sent"] == [0] * 3
    assert all(torch.equal(result, gradient(CASES["alone"], 0, step, SEED)) for step, result in enumerate(found["results"]))


def test_zeros_stay_zeros_and_equal_values_are_shared_out(ranks):
    assert not any(result.any() for result in ranks[0]["zeros"]["results"])
    assert all(result.count_nonzero() >= 0.45 * 900 for result in ranks[0]["same"]["results"])


def test_a_huge_entry_travels_and_the_others_still_do(ranks):
    for result in ranks[0]["huge entry"]["results"]:
        assert result[1500] == 2.0**21
        assert result.count_nonzero() > 0.4 * 3000


def test_sums_near_the_largest_number_stay_finite(ranks):
    """bf16's largest is below fp32's, and two of these add up to more than either holds."""
    assert all(result.isfinite().all() for result in ranks[0]["large"]["results"])
    assert all(residual.isfinite().all() for rank in range(2) for residual in ranks[rank]["large"]["residuals"])


def test_a_burst_is_sent_where_it_is_largest_and_the_rest_waits(ranks):
    name, case = "burst", CASES["burst"]
    kept = sum(message_format(stop - start, 0.9, unit="entries").kept for start, stop in parts(case.entries, 2))
    assert all(result.count_nonzero() <= kept for result in ranks[0][name]["results"])
    assert ranks[0][name]["results"][3].count_nonzero() > 0.9 * kept
    assert ranks[0][name]["results"][3].abs().max() > 50_000


def test_without_feedback_the_rest_is_lost(ranks):
    assert not ranks[0]["without feedback"]["residuals"][-1].any()
    assert not torch.equal(accounted(ranks, "without feedback", 3), given("without feedback", 3))


def test_warm_up_ends_at_the_share_that_was_asked_for(ranks):
    sent = ranks[0]["warm-up"]["sent"]
    assert sent[:5] == sorted(sent[:5], reverse=True)
    assert len(set(sent[:5])) == 5
    assert sent[4] == sent[5] == exchange_bytes(2048, 2, 0, 0.9, unit="entries")
    assert sent[1] == exchange_bytes(2048, 2, 0, 1 - 0.1 ** (2 / 5), unit="entries")


@pytest.mark.parametrize("name", SPOILED)
def test_a_bad_value_makes_its_part_nan_everywhere_and_leaves_residuals_alone(ranks, name):
    case = CASES[name]
    _, step, entry, _ = case.spoiled
    low, high = next(bounds for bounds in parts(case.entries, case.members) if bounds[0] <= entry < bounds[1])
    for rank in range(case.members):
        found = ranks[rank][name]
        assert found["results"][step][low:high].isnan().all()
        assert found["results"][step][:low].isfinite().all()
        assert found["results"][step][high:].isfinite().all()
        assert torch.equal(found["residuals"][step][low:high], found["residuals"][step - 1][low:high])
        assert found["results"][step + 1].isfinite().all()
        assert all(residual.isfinite().all() for residual in found["residuals"])


def test_going_on_from_a_save_is_exact(ranks):
    for rank in range(WORLD):
        through, again = ranks[rank]["resumed"]
        assert torch.equal(through, again)


def test_residuals_follow_their_parameters_through_other_vectors(ranks):
    whole = layout(1200)
    assert whole.numel == 1200
    total = sum(ranks[rank]["rebuilt"]["total"] for rank in range(WORLD))
    left = sum(ranks[rank]["rebuilt"]["left"] for rank in range(WORLD))
    difference = ranks[0]["rebuilt"]["received"] + left - total
    assert left.any()
    assert difference.abs().max() < 1e-2, "carried residuals round to the gradient's fp32"


def test_through_levels_chunks_and_schemes_nothing_is_lost(ranks):
    """Two hosts of two ranks; at last all that stayed at home has come."""
    found = [ranks[rank]["through levels"] for rank in range(WORLD)]
    total = sum(each["total"] for each in found)
    assert torch.equal(found[0]["received"], total)
    assert all(torch.equal(each["received"], total) for each in found)
    assert all(each["left"][:-1].any(dim=1).all() and not each["left"][-1].any() for each in found)


def test_the_reducer_drops_the_share_of_its_level(ranks):
    for rank in range(WORLD):
        sent = ranks[rank]["through levels"]["sent"].tolist()
        assert sent[0] == exchange_bytes(1500, 2, rank % 2, 0.9, "bf16") or sent[0] == exchange_bytes(1500, 2, 0, 0.9, "bf16")
        assert sent[3] > 3 * sent[0]


def test_fewer_ranks_take_over_what_those_that_left_had_not_sent(ranks):
    found = [ranks[rank]["fewer ranks"] for rank in range(WORLD)]
    total = sum(each["total"] for each in found)
    assert torch.equal(found[0]["received"] + found[0]["left"] + found[1]["left"], total)


def test_powersgd_is_plain_at_first_then_of_low_rank_and_keeps_its_errors_over_a_load(ranks):
    """Mean of gradients and old errors = result + mean of new errors, for each parameter, whatever bucket it was in."""
    found = [ranks[rank]["low rank"] for rank in range(WORLD)]
    for step in range(10):
        for name in found[0]["given"][0]:
            mean = sum(each["given"][step][name] for each in found) / WORLD
            got = found[0]["got"][step][name]
            assert all(torch.equal(each["got"][step][name], got) for each in found)
            if step in (0, 1, 2, 5, 6):
                assert torch.allclose(got, mean, atol=1e-6)
                continue
            old, new = (sum(each["errors"][s].get(name, torch.zeros(1)) for each in found) / WORLD for s in (step - 1, step))
            assert torch.allclose(mean.flatten() + old, got.flatten() + new, atol=1e-6)
            if got.dim() == 2:
                assert torch.linalg.matrix_rank(got, rtol=1e-4) == 2
                assert new.norm() > 1e-4
    assert "communication hook already" in found[0]["second"]
