"""What is saved comes back bit for bit, in place where the caller has tensors, and nothing is taken for what it is not."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laneway.checkpoint import CheckpointStore, PerRank
from laneway.core import InputError, LanewayError

FLOAT_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(FLOAT_BITS[tensor.dtype]) if tensor.dtype in FLOAT_BITS else tensor


def same(left, right) -> bool:
    """Equal in type, structure and every bit (NaN included)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return left == right or (left != left and right != right)


TENSORS = {
    "fp32": torch.tensor([1.5, -0.0, float("nan"), float("inf"), 1e-45]),
    "bf16": torch.arange(-300, 300, dtype=torch.int16).view(torch.bfloat16),
    "fp16": torch.arange(50, dtype=torch.int16).view(torch.float16),
    "fp64": torch.tensor([[0.1, 0.2], [0.3, 1e300]], dtype=torch.float64),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "uint8": torch.arange(256, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(3.25),
    "scalar_int": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "slice": torch.arange(10.0)[3:6],
    "expanded": torch.ones(1).expand(4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_comes_back_bit_for_bit_in_place(store, name):
    value = TENSORS[name]
    store.save(1, {name: value})
    target = torch.zeros(value.shape, dtype=value.dtype)
    state, where = {name: target}, target.data_ptr()
    store.load(1, state)
    assert state[name] is target
    assert target.data_ptr() == where
    assert same(target, value.contiguous())


def test_tensors_come_back_where_the_caller_has_none(store):
    store.save(1, {"all": dict(TENSORS), "list": list(TENSORS.values())})
    state = {"all": None, "list": None}
    store.load(1, state)
    assert same(state["all"], {name: value.contiguous() for name, value in TENSORS.items()})
    assert same(state["list"], [value.contiguous() for value in TENSORS.values()])


def test_a_non_contiguous_target_is_filled(store):
    store.save(1, {"w": torch.arange(6.0).reshape(2, 3)})
    storage = torch.zeros(3, 2)
    store.load(1, {"w": storage.t()})
    assert torch.equal(storage, torch.arange(6.0).reshape(2, 3).t())


PLAIN = {
    "none": None,
    "bool": True,
    "int": 2**80,
    "floats": [0.1, -0.0, float("inf"), float("nan"), 5e-324],
    "text": "Grüße, 世界\n\x00",
    "bytes": bytes(range(256)),
    "tuple": (1, (2, [3, ()]), {}),
    "int_keys": {0: "a", -1: {"b": 2}, (1, "x"): 3, None: 4, 1.5: 5},
    "dollar": {"$tensor": "not one", "$dict": []},
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "empty_array": np.zeros((0, 2)),
    "scalar": np.float32(1.25),
    "python_rng": random.Random(3).getstate(),
    "numpy_rng": np.random.RandomState(3).get_state(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_comes_back_with_its_types(store, name):
    store.save(1, {"value": PLAIN[name]})
    state = {"value": "something else"}
    store.load(1, state)
    assert same(state["value"], PLAIN[name])


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(list(TENSORS.values())).map(lambda value: value.contiguous()),
)
keys = st.one_of(st.text(max_size=4).filter(lambda key: "/" not in key), st.sampled_from(["$tensor", "$tuple", "state"]))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees, number=st.integers(0, 2**30))
def test_any_tree_comes_back(run, tree, number):
    store = CheckpointStore(run, keep=1)
    store.save(number, {"tree": tree})
    state = {"tree": None}
    store.load(number, state)
    assert same(state["tree"], tree)


def test_containers_of_the_caller_stay_the_same_objects(store):
    store.save(1, {"model": {"w": torch.ones(2), "n": 3}, "list": [torch.ones(1), "new"], "pair": (torch.ones(1), 5)})
    model, items, first = {"w": torch.zeros(2), "n": 0}, [torch.zeros(1), "old"], torch.zeros(1)
    state = {"model": model, "list": items, "pair": (first, 0)}
    store.load(1, state)
    assert state["model"] is model
    assert state["list"] is items
    assert (model["n"], items[1], state["pair"][1]) == (3, "new", 5)
    assert model["w"].tolist() == [1, 1]
    assert items[0].item() == 1
    assert state["pair"][0] is first
    assert first.item() == 1


def test_a_part_may_be_loaded_alone(store):
    store.save(1, {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}, "extras": 5})
    state = {"model": {"w": torch.zeros(2)}}
    store.load(1, state)
    assert list(state) == ["model"]
    assert state["model"]["w"].tolist() == [1, 1]


SAVED = {"model": {"a": torch.ones(2, 3), "b": torch.ones(4)}, "pair": (torch.ones(1), 2), "extras": 1}
MISFITS = {
    "missing": ({"model": {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(1)}}, "model/c is not in the checkpoint"),
    "unexpected": ({"model": {"a": torch.ones(2, 3)}}, "model/b is only in the checkpoint"),
    "shape": (
        {"model": {"a": torch.ones(3, 2), "b": torch.ones(4)}},
        r"float32 \[2, 3\] in the checkpoint, float32 \[3, 2\] here",
    ),
    "dtype": ({"model": {"a": torch.ones(2, 3).bfloat16(), "b": torch.ones(4)}}, "bfloat16"),
    "no tensor": ({"extras": torch.ones(1)}, "extras is no tensor in the checkpoint"),
    "no dict": ({"extras": {"w": torch.ones(1)}}, "extras is no dict in the checkpoint"),
    "length": ({"pair": (torch.ones(1),)}, "pair has another length"),
    "top level": ({"other": None}, "other is not in the checkpoint"),
    "per rank": ({"extras": PerRank(torch.ones(1))}, "extras is not kept by rank"),
    "several": (dict.fromkeys("efghi"), "; and 2 more$"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(store, name):
    target, message = MISFITS[name]
    store.save(1, SAVED)
    before = {"saved": SAVED, "target": target}
    copy = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, before)
    with pytest.raises(LanewayError, match=message) as error:
        store.load(1, target)
    assert "\n" not in str(error.value)
    assert same(_unwrap(copy), _unwrap(before))


def _unwrap(value):
    if isinstance(value, PerRank):
        return ["per rank", _unwrap(value.value)]
    return {key: _unwrap(item) for key, item in value.items()} if isinstance(value, dict) else value


class Custom:
    pass


REFUSED = {
    "an object": ({"x": {"y": Custom()}}, r"state\.x\.y: got 'Custom'"),
    "a function": ({"x": [len]}, r"state\.x\.0"),
    "a set": ({"x": {1, 2}}, "'set'"),
    "an enum": ({"x": torch.Size([1])}, "'Size'"),
    "an object array": ({"x": np.array([Custom()])}, "dtype object"),
    "a sparse tensor": ({"x": torch.eye(2).to_sparse()}, "sparse"),
    "a meta tensor": ({"x": torch.empty(2, device="meta")}, "meta"),
    "nested per-rank": ({"x": PerRank({"y": PerRank(1)})}, "no PerRank inside another"),
    "keys that join alike": ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "a/b"),
    "a custom key": ({"x": {Custom: 1}}, "dict keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_data_is_refused_before_anything_is_written(three, name):
    state, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        three.save(4, state)
    assert three.steps() == [1, 2, 3]
    assert three.latest_step() == 3


@pytest.mark.parametrize("step", [-1, 1.0, True, None, "3"])
def test_a_bad_step_is_refused(three, step):
    with pytest.raises(InputError, match="step"):
        three.save(step, {})
    with pytest.raises(InputError, match="step"):
        three.load(step, {})


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_a_bad_keep_is_refused(run, keep):
    with pytest.raises(InputError, match="keep"):
        CheckpointStore(run, keep=keep)


def test_an_empty_state_and_step_zero(store):
    store.save(0, {})
    state = {}
    store.load(0, state)
    assert state == {}
    assert store.latest_step() == 0


def test_per_rank_values_of_one_process(store):
    store.save(1, {"rng": PerRank({"t": torch.arange(3), "n": 5})})
    mine = PerRank({"t": torch.zeros(3, dtype=torch.int64), "n": 0})
    fresh = {"rng": None}
    store.load(1, {"rng": mine})
    store.load(1, fresh)
    assert mine.value["t"].tolist() == [0, 1, 2]
    assert mine.value["n"] == 5
    assert same(fresh["rng"].value, mine.value)
    assert store.notices == []
