"""Pieces, sizes and coding of messages, without processes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.drop import bits
from laneway.cluster.drop.message import decode, encode, poison, poisoned
from laneway.cluster.drop.pattern import Pattern
from laneway.cluster.drop.pieces import PADDING, Piece, Pieces
from laneway.cluster.drop.sizes import BLOCK, drop_for_saving, exchange_bytes, message_format, parts
from laneway.cluster.drop.values import narrow, widen
from laneway.core import InputError

WIRES = st.sampled_from(["fp32", "bf16", "int8"])
UNITS = st.sampled_from(["entries", "blocks"])
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
CPU = torch.device("cpu")


@given(st.lists(st.booleans(), max_size=70))
def test_flags_come_back(flags):
    given_flags = torch.tensor(flags, dtype=torch.bool)
    packed = bits.pack(given_flags)
    assert packed.numel() == -(-len(flags) // 8)
    assert torch.equal(bits.unpack(packed, len(flags)), given_flags)
    assert packed.tolist() == [sum(flag << i for i, flag in enumerate(flags[at : at + 8])) for at in range(0, len(flags), 8)]
    assert bits.nonzero(given_flags).tolist() == [i for i, flag in enumerate(flags) if flag]


@given(st.lists(FLOATS, min_size=1, max_size=150), WIRES)
def test_what_narrowing_loses_is_an_fp32_number(values, wire):
    """sent + rest is the value, bit for bit, and rest is small; up to the largest and down to the smallest numbers."""
    vector = torch.tensor(values)
    sent = widen(*narrow(vector, wire))
    rest = vector - sent
    assert sent.isfinite().all()
    assert torch.equal(sent + rest, vector)
    assert torch.equal(sent.double() + rest.double(), vector.double())
    if wire == "bf16":
        assert (rest.abs() <= vector.abs() * 2**-8 + 2.0**-133).all()
    if wire == "int8":
        blocks = torch.nn.functional.pad(vector, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        limit = (blocks.abs().amax(1, keepdim=True).double() / 127 + 2.0**-126).expand_as(blocks).flatten()[: len(values)]
        assert (rest.double().abs() <= limit).all(), "half of a step, which is at most twice the finest"


@given(st.integers(1, 300), st.sampled_from([0.0, 0.02, 0.3, 0.6, 0.9, 0.98, 0.999]), WIRES, UNITS)
def test_a_message_has_the_size_stated_and_comes_back(entries, drop, wire, unit):
    form = message_format(entries, drop, wire, unit)
    vector = torch.randn(entries)
    pattern = Pattern(Pieces.of({"p": entries}), 64, 0.5, CPU)
    pattern.observe(vector)
    units = pattern.choose(vector, 0, entries, form)
    message = torch.empty(form.nbytes, dtype=torch.uint8)
    kept = encode(vector, units, form, message)
    assert not poisoned(message, form)
    again, out, expected = decode(message, form), torch.empty(entries), torch.zeros(entries)
    again.write_to(out)
    kept.add_to(expected)
    assert torch.equal(out, expected)
    assert torch.equal(kept.values, again.values)
    size = 1 if unit == "entries" else BLOCK
    most = entries if form.coding == "dense" else max(size, math.ceil((1 - drop) * -(-entries // size)) * size)
    assert out.count_nonzero() <= most
    poison(message)
    assert poisoned(message, form)


@given(st.integers(0, 5000), st.floats(0, 0.9999), WIRES, st.sampled_from(["auto", "entries", "blocks"]))
def test_no_other_coding_is_smaller(entries, drop, wire, unit):
    form = message_format(entries, drop, wire, unit)
    b = {"fp32": 4, "bf16": 2, "int8": 1}[wire]
    scaled = lambda slots: slots * b + (-(-slots // 64) if wire == "int8" else 0)  # noqa: E731
    k, n = form.kept, form.units
    if form.coding == "dense":
        k = min(n, max(1, math.ceil((1 - drop) * n - 1e-9)))
    choices = [scaled(entries), scaled(k * form.unit) + -(-n // 8), scaled(k * form.unit) + 4 * k]
    assert form.nbytes == (min(choices) if entries else 0)


def test_which_form_is_taken():
    taken = {drop: message_format(100_000, drop, "bf16") for drop in (0.0, 0.05, 0.5, 0.79, 0.8, 0.9, 0.99)}
    assert [form.coding for form in taken.values()] == ["dense", "dense", "mask", "mask", "mask", "mask", "index"]
    assert [form.unit for form in taken.values()][2:] == [1, 1, 64, 64, 64]
    assert message_format(100_000, 0.98, "fp32", "entries").coding == "index"


@pytest.mark.parametrize(("wire", "share"), [("fp32", 0.43125), ("bf16", 0.4625), ("int8", 0.4 + 8 / 65)])
def test_forty_percent_and_where_it_breaks_even(wire, share):
    assert drop_for_saving(0.40, wire) == pytest.approx(share)
    n = 1 << 20
    dense = message_format(n, 0, wire).nbytes
    assert message_format(n, share, wire, "entries").nbytes == pytest.approx(0.6 * dense, rel=1e-4)
    even = drop_for_saving(0.0, wire)
    assert message_format(n, even - 0.001, wire).coding == "dense"
    assert message_format(n, even + 0.001, wire).coding == "mask"


@given(st.integers(0, 3000), st.integers(1, 9))
def test_parts_cover_the_vector_in_whole_blocks(entries, members):
    found = parts(entries, members)
    assert found[0][0] == 0
    assert found[-1][1] == entries
    assert all(low <= high for low, high in found)
    assert all(high == other and high % BLOCK in (0, entries % BLOCK) for (_, high), (other, _) in pairwise(found))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_shards_of_pieces_put_together_are_the_whole(lengths, data):
    whole = Pieces.of({f"p{i}": length for i, length in enumerate(lengths)})
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.numel), max_size=4)))
    bounds = [0, *cuts, whole.numel]
    shards = [whole.shard(a, b) for a, b in pairwise(bounds)]
    assert [shard.numel for shard in shards] == [b - a for a, b in pairwise(bounds)]
    assert sum(shards, Pieces()) == whole
    assert hash(sum(shards, Pieces())) == hash(whole)
    beyond = whole.shard(0, whole.numel + 3)
    assert beyond.pieces[-1] == Piece(PADDING, 0, 3, 3)
    assert beyond.shard(0, whole.numel) == whole


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_thresholds_follow_each_parameters_own_scale(seed):
    """A parameter whose gradients are 10⁴ times smaller keeps as large a share; of one that is mostly zero, what is not."""
    draw = torch.Generator().manual_seed(seed)
    large, small = torch.randn(4000, generator=draw), 1e-4 * torch.randn(4000, generator=draw)
    sparse = torch.randn(4000, generator=draw) * (torch.rand(4000, generator=draw) < 0.05)
    pieces = Pieces.of({"large": 4000, "small": 4000, "sparse": 4000})
    pattern, form = Pattern(pieces, 3000, 0.9, CPU), message_format(12_000, 0.5, "fp32", "entries")
    for _ in range(3):
        vector = torch.cat([large, small, sparse])
        pattern.observe(vector)
    kept = pattern.choose(vector, 0, 12_000, form)
    counts = torch.bincount(kept // 4000, minlength=3)
    assert counts.sum() <= form.kept
    assert counts.sum() > 0.9 * form.kept
    assert abs(int(counts[0]) - int(counts[1])) < 0.15 * counts[0]
    assert counts[2] > 0.96 * sparse.count_nonzero()


def test_scales_are_smoothed_and_a_step_ten_times_as_large_keeps_as_many():
    vector, pieces = torch.randn(8000), Pieces.of({"p": 8000})
    pattern, form = Pattern(pieces, 2000, 0.9, CPU), message_format(8000, 0.5, "fp32", "entries")
    pattern.observe(vector)
    first = pattern.scales().clone()
    pattern.observe(10 * vector)
    assert torch.allclose(pattern.scales(), first * (0.9 + 0.1 * math.sqrt(10)) ** 2)
    assert 0.95 * form.kept < pattern.choose(10 * vector, 0, 8000, form).numel() <= form.kept


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: message_format(10, 1.0), "drop"),
        (lambda: message_format(10, True), "drop"),
        (lambda: message_format(10, 0.1, "fp16"), "wire"),
        (lambda: message_format(10, 0.1, unit="rows"), "unit"),
        (lambda: message_format(-1, 0.1), "entries"),
        (lambda: drop_for_saving(0.97), "saving"),
        (lambda: parts(10, 0), "members"),
        (lambda: exchange_bytes(10, 2, 0, float("nan")), "drop"),
        (lambda: Piece("p", 3, 3, 9), "piece.stop"),
        (lambda: Piece("p", 0, 3, 2), "piece.numel"),
        (lambda: Pieces.of({"p": 4}).shard(3, 2), "high"),
        (lambda: Pieces(("p",)), "pieces"),
    ],
)
def test_bad_input_names_the_field(call, field):
    with pytest.raises(InputError) as error:
        call()
    assert error.value.field == field
