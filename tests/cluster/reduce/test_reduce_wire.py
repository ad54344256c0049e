"""Wire formats, places and bounds, in one process."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.reduce.bound import error_bound
from laneway.cluster.reduce.defaults import direct_scheme
from laneway.cluster.reduce.places import find_places, split
from laneway.cluster.reduce.rounds import bounds_of
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme
from laneway.cluster.reduce.wire import BLOCK, Bfloat16, Int8, codec_for
from laneway.core import InputError


def carried(codec, numbers):
    message = torch.empty(codec.length(numbers.numel()), dtype=codec.dtype)
    codec.encode(numbers, message)
    result = torch.empty_like(numbers)
    codec.decode(message, result)
    return result


@given(st.integers(0, 700), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=40, deadline=None)
def test_int8_is_within_half_a_step_of_its_block(length, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(length, generator=generator) * 10.0 ** torch.randint(-6, 7, (length,), generator=generator)).to(dtype)
    error = (carried(Int8, numbers).double() - numbers.double()).abs()
    for start in range(0, length, BLOCK):
        largest = numbers[start : start + BLOCK].double().abs().max()
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20  # a bf16 result, a scale in fp32
        assert error[start : start + BLOCK].max() <= largest * (1 / 254 + rounding)


def test_int8_bytes_are_just_over_a_quarter():
    assert Int8.length(BLOCK * 1000) == BLOCK * 1000 + 4 * 1000
    assert [Int8.length(count) for count in (0, 1, 4, 5, 129)] == [0, 8, 8, 12, 140]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_int8_shows_a_broken_block_and_keeps_the_others(bad):
    numbers = torch.randn(3 * BLOCK)
    numbers[BLOCK + 7] = bad
    result = carried(Int8, numbers)
    assert not result[BLOCK : 2 * BLOCK].isfinite().any()
    assert result[:BLOCK].isfinite().all()
    assert result[2 * BLOCK :].isfinite().all()


def test_int8_of_zeros_and_of_the_smallest_numbers():
    assert torch.equal(carried(Int8, torch.zeros(200)), torch.zeros(200))
    small = torch.full((130,), 1e-44)
    assert (carried(Int8, small) - small).abs().max() <= 1e-44


def test_bf16_rounds_to_nearest():
    numbers = torch.randn(1000)
    assert torch.equal(carried(Bfloat16, numbers), numbers.bfloat16().float())


def test_half_precision_travels_as_it_is_but_on_int8():
    assert codec_for("fp32", torch.float32) is None
    assert codec_for("bf16", torch.float32) is Bfloat16
    assert codec_for("bf16", torch.float16) is codec_for("bf16", torch.bfloat16) is None
    assert codec_for("int8", torch.float16) is Int8


@given(st.integers(0, 10**6), st.integers(1, 50), st.data())
def test_parts_are_equal_consecutive_and_complete(length, parts, data):
    width = data.draw(st.integers(1, parts))
    bounds = split(length, parts, width)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes[:width]) - min(sizes[:width]) <= 1
    assert not any(sizes[width:])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 500))
def test_parts_of_a_torus_cover_the_vector_once(dims, length):
    bounds = sorted(bounds_of("torus", dims, length, math.prod(dims), math.prod(dims)))
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))


def test_places_of_a_cube():
    places = find_places([(rank // 4, rank // 2 % 2) for rank in range(8)])
    assert places.groups[0] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert places.groups[1] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert places.groups[2] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (places.sizes, places.widths, places.ragged) == ((2, 2, 2), (2, 2, 2), False)


def test_places_follow_hosts_and_not_rank_numbers():
    places = find_places([(1, 0), (0, 0), (1, 0), (0, 0)])
    assert places.groups == (((1, 3), (0, 2)), ((1,), (3,), (0,), (2,)), ((1, 0), (3, 2)))
    assert places.order == (1, 3, 0, 2)


def test_ragged_hosts_and_racks_leave_the_surplus_out_further_out():
    """Rack 0 has hosts of 3 and 1, rack 1 one host of 2."""
    places = find_places([(0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (1, 0)])
    assert places.groups == (((0, 1, 2), (3,), (4, 5)), ((0, 3), (4,)), ((0, 4),))
    assert (places.sizes, places.widths, places.ragged) == ((3, 2, 2), (1, 1, 2), True)
    assert [len(group) for group in places.of_rank(1)] == [3, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12))
def test_every_share_is_summed_over_all_ranks_once(positions):
    """Whose numbers are in each rank's share, followed over the levels."""
    places, ranks, length = find_places(positions), range(len(positions)), 5040
    spans, members = [(0, length)] * len(ranks), [[rank] for rank in ranks]
    for level, groups in enumerate(places.groups):
        for group in groups:
            start, stop = spans[group[0]]
            assert all(spans[rank] == (start, stop) for rank in group)
            joined = sorted(each for rank in group for each in members[rank])
            outermost = level + 1 == len(places.groups)
            for rank, (first, last) in zip(group, split(stop - start, len(group), places.widths[level]), strict=True):
                members[rank] = joined
                spans[rank] = (start, stop) if outermost else (start + first, start + last)
        acting = {rank for group in groups for rank in group}
        assert all(spans[rank][0] == spans[rank][1] for rank in ranks if rank not in acting)
    complete = {spans[rank] for rank in ranks if spans[rank][1] > spans[rank][0]}
    assert all(members[rank] == list(ranks) for rank in ranks if spans[rank] in complete)
    assert sum(stop - start for start, stop in complete) == length


@pytest.mark.parametrize("positions", [[], [(0,), (0, 1)], [(0,), ("a",)]])
def test_positions_that_make_no_levels(positions):
    with pytest.raises(InputError, match="positions"):
        find_places(positions)


def test_the_bound_does_not_grow_with_the_ranks():
    for wire in ("fp32", "bf16", "int8"):
        scheme = direct_scheme(3, outer_wire=wire)
        assert error_bound(scheme, (2, 2, 2)) == error_bound(scheme, (8, 64, 512))
    assert error_bound(direct_scheme(3), (8, 64, 512)) < 2.0**-18
    assert error_bound(direct_scheme(3, outer_wire="bf16"), (8, 64, 512)) < 2.0**-7.9
    assert error_bound(ReductionScheme((LevelScheme("ring"),)), (64,)) > error_bound(ReductionScheme((LevelScheme(),)), (64,))
    assert error_bound(FLAT, (2, 2), double=True) == 4 * 2.0**-53
