"""What the next steps will need: real peaks of a real model, a formula without noise, processes that only history can tell."""

import json
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from laneway.core import InputError
from laneway.memory.predict import DemandModel, Forecaster, Signature
from laneway.memory.regression import best_fit
from laneway.models.gpt import GPT, GPTConfig

FLOOR, STATIC = 290_000_000, 203_000_000


def shape(batch: int, length: int) -> Signature:
    return Signature.of(np.empty((batch, length), np.int64))


def transformer(signature: Signature, pair_bytes: int = 0) -> int:
    """Peak of a transformer of width 384 with 8 layers: weights, Adam, 34 values a token and layer, scores if kept."""
    return max(FLOOR, STATIC + 8 * 34 * 384 * 4 * signature.tokens + pair_bytes * signature.pairs)


# Signatures


def test_a_signature_is_what_shapes_and_dtypes_say_and_nothing_else():
    ids = torch.randint(0, 9, (4, 6))
    one = Signature.of({"ids": ids, "mask": torch.ones(4, 6, dtype=torch.bool), "note": "text", "step": 3})
    other = Signature.of({"step": 7, "mask": np.zeros((4, 6), bool), "ids": np.zeros((4, 6), np.int64)})
    assert one == other
    assert hash(one) == hash(other)
    assert (one.batch, one.length, one.tokens, one.pairs) == (4, 6, 24, 144)
    assert one != Signature.of({"ids": ids.int(), "mask": torch.ones(4, 6, dtype=torch.bool)})
    assert one != Signature.of({"ids": ids, "mask": torch.ones(4, 7, dtype=torch.bool)})
    assert one != Signature.of([ids, torch.ones(4, 6, dtype=torch.bool)])


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ((torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 50)), (3, 5)),
        ((torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 1, 8, 8, dtype=torch.long)), (2, 8)),
        ({"packed": torch.zeros(70, dtype=torch.long), "offsets": torch.zeros(4, dtype=torch.long)}, (1, 70)),
        (torch.zeros(2, 3, 4, 5), (2, 60)),
        ([torch.tensor(1.0)], (1, 1)),
    ],
)
def test_batch_and_length_come_from_the_integers(batch, sizes):
    signature = Signature.of(batch)
    assert (signature.batch, signature.length) == sizes
    assert signature.tokens == math.prod(sizes)
    assert Signature.of(batch, tokens=17).tokens == 17


def test_ragged_batches_count_what_is_packed():
    ragged = torch.nested.nested_tensor([torch.arange(3), torch.arange(8)], layout=torch.jagged)
    signature = Signature.of({"ids": ragged})
    assert (signature.batch, signature.length, signature.tokens) == (1, 11, 11)


@pytest.mark.parametrize("batch", [[], None, {"a": "b"}])
def test_a_batch_without_arrays_is_refused(batch):
    with pytest.raises(InputError, match=r"batch: got .* accepted: a nest with at least one array"):
        Signature.of(batch)


def test_wrong_token_counts_are_refused():
    with pytest.raises(InputError, match="tokens: got 0"):
        Signature.of(torch.zeros(1, 1), tokens=0)


@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 70))
def test_buckets_round_up_and_keep_the_rest(batch, length, multiple):
    signature = Signature.of({"ids": np.empty((batch, length), np.int64), "labels": np.empty(batch, np.int64)})
    bucket = signature.bucketed(multiple)
    assert bucket.length % multiple == 0
    assert 0 <= bucket.length - length < multiple
    assert bucket.tokens == batch * bucket.length
    longer = {"ids": np.empty((batch, bucket.length), np.int64), "labels": np.empty(batch, np.int64)}
    assert batch == 1 or batch == length or bucket == Signature.of(longer)
    assert bucket.bucketed(multiple) == bucket
    assert Signature.from_json(json.loads(json.dumps(bucket.as_json()))) == bucket


# The model


@pytest.mark.parametrize("pair_bytes", [0, 8 * 6 * 4])
@pytest.mark.parametrize("seed", range(4))
def test_unseen_shapes_lie_on_the_fit(pair_bytes, seed):
    draw = random.Random(seed)
    model = DemandModel()
    assert model.predict(shape(1, 1)) is None
    shapes = [shape(draw.choice((2, 4, 8)), draw.randrange(96, 1025, 8)) for _ in range(8)]
    for signature in shapes:
        model.observe(signature, transformer(signature, pair_bytes))
    for _ in range(40):
        unseen = shape(draw.choice((1, 3, 16)), draw.randrange(100, 1500, 8) + 1)
        told, true = model.predict(unseen), transformer(unseen, pair_bytes)
        assert told.source == "fitted"
        if true > 1.1 * FLOOR:
            assert told.bytes == pytest.approx(true, rel=1e-3)
            assert told.low <= true <= told.high


def test_the_form_is_no_richer_than_the_shapes_can_tell():
    line = [shape(4, length) for length in (64, 128, 256)]
    model = DemandModel()
    for signature in line:
        model.observe(signature, int(transformer(signature) * (1 + 0.004 * math.sin(signature.length))))
    assert model.fit().form in ("constant", "linear")
    rich = DemandModel()
    for length in (64, 128, 256, 384, 512, 768):
        rich.observe(shape(2, length), transformer(shape(2, length), 20_000))
    assert rich.fit().form == "attention"


def test_a_floor_is_a_floor():
    model = DemandModel()
    for length in (8, 16, 24, 32, 512, 640, 768, 1024):
        model.observe(shape(1, length), transformer(shape(1, length)))
    assert model.predict(shape(1, 12)).bytes == pytest.approx(FLOOR, rel=1e-9)
    assert model.predict(shape(1, 900)).bytes == pytest.approx(transformer(shape(1, 900)), rel=1e-6)


def test_outliers_do_not_bend_the_line():
    tokens = np.linspace(100, 4000, 24)
    peaks = 1e8 + 4e5 * tokens
    bent = peaks.copy()
    bent[[3, 11, 20]] *= (1.6, 0.5, 1.4)
    fit = best_fit(tokens, tokens**2, bent)
    assert fit.form == "linear"
    assert [fit(t, t**2) for t in tokens] == pytest.approx(peaks.tolist(), rel=1e-6)


def test_more_tokens_never_need_less():
    model = DemandModel()
    for length, peak in ((100, 900), (200, 800), (300, 700), (400, 650)):
        model.observe(shape(1, length), peak * 1000)
    predictions = [model.predict(shape(1, length)).bytes for length in (50, 150, 1000, 10_000)]
    assert predictions == sorted(predictions)


def test_one_shape_alone_gives_too_much_rather_than_too_little():
    model = DemandModel()
    model.observe(shape(2, 128), transformer(shape(2, 128)))
    assert model.predict(shape(2, 512)).bytes >= transformer(shape(2, 512))
    assert model.predict(shape(2, 64)).bytes >= transformer(shape(2, 64))


def test_a_seen_shape_is_looked_up_and_follows_the_last_step():
    model = DemandModel()
    for peak in (100_000, 150_000, 150_000):
        model.observe(shape(2, 8), peak)
    told = model.predict(shape(2, 8))
    assert (told.bytes, told.source) == (150_000, "seen")
    assert told.low == 100_000
    for _ in range(4):
        model.observe(shape(2, 8), 150_000)
    assert model.predict(shape(2, 8)).low == pytest.approx(150_000, rel=0.006)


def test_a_bucket_shares_what_it_learnt():
    model = DemandModel(bucket=64)
    model.observe(shape(2, 65), 5000)
    assert model.predict(shape(2, 127)).source == "seen"
    assert model.predict(shape(2, 129)).source == "fitted"
    model.observe(shape(2, 100), 4000)
    assert model.predict(shape(2, 127)).bytes == 5000, "what the largest of the bucket took"


def test_however_many_shapes_memory_is_bounded():
    model = DemandModel()
    for length in range(1, 4300):
        model.observe(shape(1, length), 1000 + 7 * length)
    assert len(model) == 4096
    assert model.predict(shape(1, 20_000)).bytes == pytest.approx(1000 + 7 * 20_000, rel=1e-6)


@pytest.mark.parametrize("peak", [0, -1, 1.5, True])
def test_a_peak_is_a_number_of_bytes(peak):
    for learner in (DemandModel(), Forecaster()):
        with pytest.raises(InputError, match="peak: got"):
            learner.observe(shape(1, 1), peak)


# Forecasts


def drive(forecaster: Forecaster, shapes: list[Signature], peak=transformer, known: int = 8) -> list:
    """Forecast before each step with ``known`` shapes in view, then observe it; (forecast, true peaks of its horizon)."""
    made = []
    peaks = [peak(signature) for signature in shapes]
    for step, signature in enumerate(shapes):
        made.append((forecaster.forecast(shapes[step : step + known]), peaks[step : step + forecaster.horizon]))
        forecaster.observe(signature, peaks[step])
    return made


def buckets(draw: random.Random, steps: int) -> list[Signature]:
    return [shape(8, 64 * draw.randint(1, 16)) for _ in range(steps)]


def test_real_peaks_of_a_variable_length_run(one_thread):
    """Steps of a GPT with AdamW, peaks from the profiler's record of every allocation, lengths in buckets, look-ahead."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, dim=32, heads=2, residual="residual", context=1024))
    optimizer = torch.optim.AdamW(model.parameters())

    def peak(signature: Signature) -> int:
        ids = torch.randint(0, 256, (signature.batch, signature.length))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
        return int(live.max())

    peak(shape(1, 32))  # the first step makes the optimizer's state
    draw = random.Random(1)
    shapes = [shape(draw.choice((1, 2, 4)), 32 * draw.randint(1, 8)) for _ in range(30)]
    forecaster = Forecaster(horizon=8)
    drive(forecaster, shapes, peak)
    told = forecaster.calibration()
    assert told.steps == 29
    assert told.coverage >= 0.9
    assert told.mean_error <= 0.05
    spike = shape(4, 4 * 256)  # four times the tokens of the largest step so far
    predicted = forecaster.forecast([spike]).peaks[0]
    assert predicted.source == "fitted"
    assert predicted.bytes >= 0.98 * peak(spike)


@pytest.mark.parametrize("seed", range(3))
def test_with_the_coming_batches_forecasts_hold(seed):
    forecaster = Forecaster(horizon=8)
    made = drive(forecaster, buckets(random.Random(seed), 200))
    told = forecaster.calibration()
    assert made[0][0] is None, "nothing was observed"
    assert told.steps == 199
    assert told.coverage >= 0.9
    assert told.mean_error <= 0.05
    assert forecaster.calibration("highest").coverage >= 0.9
    sources = [forecaster.calibration(source).steps for source in ("seen", "fitted", "history")]
    assert sum(sources) == told.steps
    assert sources[0] > sources[1] > 0


def test_a_spike_in_view_is_told_and_one_out_of_view_is_not():
    draw = random.Random(5)
    forecaster = Forecaster(horizon=8)
    drive(forecaster, buckets(draw, 60))
    spike = shape(8, 4 * 64 * 16)
    true = transformer(spike)
    blind, seeing = forecaster.forecast(), forecaster.forecast([*buckets(draw, 4), spike])
    assert blind.highest.source == "history"
    assert blind.highest.high < 0.5 * true, "history cannot see it"
    assert seeing.highest == seeing.peaks[4]
    assert 0.98 * true <= seeing.highest.bytes <= 1.02 * true
    assert [told.source for told in seeing.peaks[5:]] == ["history"] * 3


def horizon_coverage(shapes: list[Signature], warm: int = 64) -> float:
    forecaster = Forecaster(horizon=8)
    made = drive(forecaster, shapes, known=0)[warm:-8]
    return float(np.mean([max(coming) <= told.highest.high for told, coming in made]))


@pytest.mark.parametrize("seed", range(3))
def test_history_alone_covers_what_repeats_and_what_climbs(seed):
    draw = random.Random(seed)
    assert horizon_coverage(buckets(draw, 500)) >= 0.9
    climbing = [shape(8, 128 + 2 * step + draw.randint(-16, 16)) for step in range(400)]
    assert horizon_coverage(climbing) >= 0.9


def test_history_follows_a_climb_closely():
    forecaster = Forecaster(horizon=8)
    for step in range(300):
        forecaster.observe(shape(8, 128 + 2 * step), transformer(shape(8, 128 + 2 * step)))
    true = transformer(shape(8, 128 + 2 * 307))
    assert forecaster.forecast().highest.high == pytest.approx(true, rel=0.03)


def test_forecasts_have_the_length_of_the_horizon():
    forecaster = Forecaster(horizon=5)
    forecaster.observe(shape(1, 64), 1000)
    for known in range(8):
        forecast = forecaster.forecast([shape(1, 64)] * known)
        assert [told.source for told in forecast.peaks] == ["seen"] * min(known, 5) + ["history"] * max(0, 5 - known)
        for told in (*forecast.peaks, forecast.highest):
            assert told.low <= told.bytes <= told.high


def test_calibration_counts_as_by_hand():
    forecaster = Forecaster(horizon=2)
    assert forecaster.calibration().steps == 0
    assert math.isnan(forecaster.calibration().coverage)
    for length, peak in ((8, 1000), (8, 1000), (8, 2000), (8, 2000)):
        forecaster.forecast([shape(1, length)] * 2)
        forecaster.observe(shape(1, length), peak)
    told = forecaster.calibration()  # step 1 unknown; 1000 → 1000; 1000 → 2000 (half off, above); 2000 → 2000
    assert (told.coverage, told.steps) == (pytest.approx(2 / 3), 3)
    assert told.mean_error == pytest.approx(0.5 / 3)
    highest = forecaster.calibration("highest")  # begun before steps 2 and 3: 1000 for (1000, 2000), 1000 for (2000, 2000)
    assert (highest.coverage, highest.steps) == (0.0, 2)
    before = forecaster.calibration("highest")
    for _ in range(3):
        forecaster.forecast()
    for _ in range(2):
        forecaster.observe(shape(1, 8), 2000)
    assert forecaster.calibration("highest").steps == before.steps + 2, "asked three times, one horizon (and one still open)"
    with pytest.raises(InputError, match="source: got 'guess'; accepted: one of seen, fitted, history, highest"):
        forecaster.calibration("guess")


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=12, max_size=60), st.integers(0, 8), st.data())
def test_a_restored_forecaster_goes_on_exactly(sizes, known, data):
    shapes = [shape(batch, length) for batch, length in sizes]
    cut = data.draw(st.integers(1, len(shapes) - 1))
    straight, first = Forecaster(horizon=6, bucket=4), Forecaster(horizon=6, bucket=4)
    expected = drive(straight, shapes, known=known)
    for step, signature in enumerate(shapes[:cut]):
        first.forecast(shapes[step : step + known])
        first.observe(signature, transformer(signature))
    second = Forecaster(horizon=6, bucket=4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, signature in enumerate(shapes[cut:], cut):
        assert second.forecast(shapes[step : step + known]) == expected[step][0]
        second.observe(signature, transformer(signature))
    assert second.state_dict() == straight.state_dict()


def test_a_state_of_another_forecaster_is_refused():
    state = Forecaster(horizon=4, bucket=8).state_dict()
    with pytest.raises(InputError, match="horizon: got 4; accepted: 8"):
        Forecaster(horizon=8, bucket=8).load_state_dict(state)
    with pytest.raises(InputError, match="bucket: got 8; accepted: 1"):
        Forecaster(horizon=4).load_state_dict(state)


def test_no_torch_is_needed():
    import subprocess
    import sys

    code = "import sys, laneway.memory.predict, laneway.memory.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
