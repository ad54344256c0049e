"""Gradients under the manager equal those without it, bit for bit, whatever is kept, moved or computed again."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laneway.memory.activations import Activations
from laneway.memory.clock import VirtualClock
from laneway.memory.extents import storages
from laneway.memory.residency import Choice, Schedule, State
from laneway.memory.simulated import SimulatedTier


def engine(model: nn.Module | None = None, bandwidth: float = 1e6) -> Activations:
    clock = VirtualClock()
    tier = SimulatedTier(clock, 1 << 40, bandwidth, bandwidth, latency=1e-4)
    held = storages(model.parameters()) if model is not None else storages([])
    return Activations(tier, clock, torch.device("cpu"), min_bytes=1, protected=lambda t: held.get(t) is not None)


def everything(choice: Choice, allowance: float = float("inf")) -> Schedule:
    return Schedule([choice] * 10_000, [allowance])


class Net(nn.Module):
    """Views, an expanded tensor, a transpose, a tied weight, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.3)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x = self.embedding(tokens_bt)
        for _ in range(3):
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 16)).unbind(-2)
            x = x + self.drop(self.out(self.act(F.scaled_dot_product_attention(q, k, v) * q.mean(1, keepdim=True).expand_as(q))))
        return F.linear(x, self.embedding.weight)


def settled(activations: Activations) -> int:
    """Bytes in the tier when all transfers have ended."""
    activations.books.clock.advance(1e9)
    activations.books.tier.poll()
    return activations.books.tier.used


def gradients(model: nn.Module, activations: Activations | None, schedule: Schedule, seed: int = 0) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    tokens = torch.randint(0, 13, (2, 7))
    if activations is None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    else:
        activations.begin(schedule)
        with activations.hooks():
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("choice", [Choice.KEEP, Choice.MOVE])
@pytest.mark.parametrize("allowance", [0.0, 3000.0, float("inf")])
def test_gradients_are_bit_equal_and_nothing_is_left(choice, allowance):
    model = Net()
    want = gradients(model, None, Schedule())
    activations = engine(model)
    got = gradients(model, activations, everything(choice, allowance))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert activations.books.resident == 0
    assert activations.alive == 0
    assert settled(activations) == 0
    moved = activations.account.bytes_out + activations.account.cancelled
    assert moved > 0 if choice is Choice.MOVE else moved == 0


def test_parameters_never_move_and_views_of_one_storage_are_one_entry():
    model = Net()
    activations = engine(model)
    seen = []
    activations.observer = lambda kind, entry: seen.append(entry.body.key) if kind == "save" else None
    gradients(model, activations, everything(Choice.MOVE))
    of_parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    assert not of_parameters.intersection(seen)
    assert activations.extra_bytes > 0


def test_a_storage_at_an_address_used_before_is_another_entry():
    activations = engine()
    activations.begin(everything(Choice.MOVE, 0.0))
    w = torch.randn(1000, requires_grad=True)
    wanted, found, addresses = [], [], set()
    with activations.hooks():
        for _ in range(20):
            x = torch.randn(1000)
            addresses.add(x.data_ptr())
            (w * x).sum().backward()
            wanted.append(x)
            found.append(w.grad)
            w.grad = None
            graph = (w * torch.randn(1000)).sum()
            del graph, x
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("choice", [Choice.KEEP, Choice.MOVE])
@pytest.mark.parametrize("write", [lambda x, y: y.mul_(2), lambda x, y: y[:3].add_(1), lambda x, y: y.view(-1)[0].zero_()])
def test_a_write_in_place_after_saving_raises_as_torch_would(choice, write):
    x = torch.randn(5, 7, requires_grad=True)
    activations = engine(bandwidth=1e-3)  # the copy out is under way when the write comes
    activations.begin(everything(choice))
    with activations.hooks():
        y = x.exp()
        z = (y * y).sum()
        write(x, y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


def test_what_had_left_before_the_write_is_what_was_saved():
    """A snapshot: torch would refuse, but the right bytes are there."""
    x = torch.randn(50, requires_grad=True)
    activations = engine()
    activations.begin(everything(Choice.MOVE, 0.0))
    with activations.hooks():
        y = x.exp()
        want = 2 * y.detach() ** 2
        z = (y * y).sum()
        y.detach().mul_(3)
        z.backward()
    assert torch.equal(x.grad, want)


def test_saved_before_and_after_a_write_are_two_entries():
    activations = engine()
    activations.begin(everything(Choice.MOVE, 0.0))
    w = torch.ones(9, requires_grad=True)
    with activations.hooks():
        x = torch.arange(9.0)
        a = w * x
        x.add_(100)
        (a + w * x).sum().backward()
    assert torch.equal(w.grad, 2 * torch.arange(9.0) + 100)


def test_layouts_come_back_as_they_were():
    for make in (
        lambda: torch.randn(4, 6, requires_grad=True).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 1).expand(4, 9),
        lambda: torch.randn(30)[3:20:4],
        lambda: torch.randn(5, dtype=torch.complex64).conj(),
        lambda: torch.randn(4).to(torch.float8_e4m3fn),
        lambda: torch.randn(3, 4).bfloat16(),
        lambda: torch.tensor(True),
        lambda: torch.zeros(0, 3),
    ):
        activations = engine()
        activations.begin(everything(Choice.MOVE, 0.0))
        tensor = make()
        held = activations.pack(tensor)
        found = activations.unpack(held)
        assert found.dtype == tensor.dtype
        assert found.stride() == tensor.stride()
        assert found.is_conj() == tensor.is_conj()
        assert torch.equal(found.to(torch.complex64), tensor.detach().to(torch.complex64))


def test_retained_graphs_second_derivatives_and_partial_ones():
    torch.manual_seed(0)
    x = torch.randn(6, 6, requires_grad=True)

    def derivatives() -> list[Tensor]:
        y = (x @ x.t()).tanh()
        a, b = (y**3).sum(), (y * x).sum()
        (ga,) = torch.autograd.grad(a, x, create_graph=True)
        (gb,) = torch.autograd.grad(b, x, retain_graph=True)
        (gb2,) = torch.autograd.grad(b, x, retain_graph=True)
        (gg,) = torch.autograd.grad((ga**2).sum(), x)
        return [ga.detach(), gb, gb2, gg]

    want = derivatives()
    activations = engine()
    for choice in Choice.KEEP, Choice.MOVE:
        activations.begin(everything(choice, 0.0))
        with activations.hooks():
            got = derivatives()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    gc.collect()
    assert activations.alive == 0
    assert torch.autograd.gradcheck(
        lambda t: (t @ t.t()).tanh().sum(), torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    )


def test_a_graph_that_is_dropped_frees_its_entries_without_the_collector():
    activations = engine()
    activations.begin(everything(Choice.MOVE, 1e4))
    gc.disable()
    try:
        for _ in range(200):
            x = torch.randn(500, requires_grad=True)
            with activations.hooks():
                y = (x.exp() * x).sum()
            gone = weakref.ref(y)
            del x, y
            assert gone() is None
        assert activations.alive == 0
        assert activations.books.resident == 0
        assert settled(activations) == 0
    finally:
        gc.enable()


def test_checkpointed_parts_hand_over_their_inputs_alone():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8)) for _ in range(3))

    def loss(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return (x * x).sum()

    x = torch.randn(5, 8, requires_grad=True)
    torch.manual_seed(1)
    want = torch.autograd.grad(loss(x), [x, *layers.parameters()])
    activations = engine(layers)
    activations.begin(everything(Choice.MOVE, 0.0))
    torch.manual_seed(1)
    with activations.hooks():
        got = torch.autograd.grad(loss(x), [x, *layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert activations.account.writes <= 4  # three inputs and the last output


def test_an_error_in_the_forward_pass_leaves_nothing():
    activations = engine()
    activations.begin(everything(Choice.MOVE, 0.0))
    x = torch.randn(40, requires_grad=True)

    def forward() -> None:
        y = x.exp()
        y = y * y
        raise ZeroDivisionError

    with activations.hooks(), pytest.raises(ZeroDivisionError):
        forward()
    gc.collect()
    assert activations.alive == 0


def test_an_entry_asked_for_while_it_leaves_stays():
    x = torch.randn(100, requires_grad=True)
    activations = engine(bandwidth=1.0)
    activations.begin(everything(Choice.MOVE))
    with activations.hooks():
        y = x.exp()
        y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())
    assert activations.account.read_stall == 0.0
    assert all(entry.state is State.FREED for entry in activations.books.entries)


def test_a_handle_collected_by_another_thread_waits_for_nobody():
    """A tier's thread whose garbage collection finds a handle, while the thread that holds the books waits for it."""
    activations = engine()
    activations.begin(everything(Choice.KEEP))
    held = [activations.pack(torch.randn(300))]
    with activations.books.lock:
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert activations.alive == 0
    assert activations.books.resident == 0
