"""The paths of a model: three a site, one a matrix of a sub-layer, each element in one path at most."""

from __future__ import annotations

import pytest
import torch

from laneway.connections.backends import use_backend
from laneway.connections.path_gradients import PathGradients
from laneway.connections.paths import Path, paths_of
from laneway.models.gpt import GPT, GPTConfig


def model(residual: str = "mhc", layers: int = 3) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=32, context=16, layers=layers, heads=2, dim=8, streams=4, residual=residual))


def backward(net: GPT) -> None:
    net(torch.randint(0, 32, (2, 8))).square().mean().backward()


def test_every_site_and_matrix_has_its_paths():
    found = {path.name: path for path in paths_of(model())}
    assert len(found) == 3 * (2 * 3 + 4)
    assert {path.kind for path in found.values()} == {
        *(f"blocks.*.site_{site}.{group}" for site in ("attention", "ffn") for group in ("pre", "post", "res")),
        *(f"blocks.*.{matrix}" for matrix in ("attention.qkv", "attention.out", "ffn.gate_up", "ffn.out")),
    }
    assert found["blocks.1.site_ffn.res"].elements == 16 * (4 * 8 + 1) + 1


@pytest.mark.parametrize("residual", ["mhc", "hc", "mhc-lite", "kronecker", "orthogonal", "identity"])
def test_the_maps_of_a_site_are_divided_without_rest(residual):
    net = model(residual)
    taken: dict[str, torch.Tensor] = {name: torch.zeros(p.shape) for name, p in net.named_parameters()}
    names = {id(p): name for name, p in net.named_parameters()}
    for path in paths_of(net):
        for piece in path.pieces:
            taken[names[id(piece.parameter)]][piece.start : piece.stop] += 1
    for name, count in taken.items():
        if "site_" in name:
            rest = residual == "identity" and name.endswith("scale")  # H_res of the identity has no maps
            assert count.max() == 1
            assert rest or count.min() == 1
        elif name.endswith(("qkv.weight", "out.weight", "gate_up.weight")):
            assert count.min() == count.max() == 1
        else:
            assert not count.any()


def test_a_plain_residual_has_its_matrices_alone():
    assert {path.kind.rpartition(".")[2] for path in paths_of(model("residual"))} == {"qkv", "out", "gate_up"}


def test_wrappers_and_frozen_parts_leave_no_trace():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = model()
    names = [path.name for path in paths_of(net)]
    net.blocks[1] = checkpoint_wrapper(net.blocks[1])
    assert [path.name for path in paths_of(net)] == names
    net.blocks[0].requires_grad_(False)
    assert [path.name for path in paths_of(net)] == [name for name in names if not name.startswith("blocks.0.")]


def test_a_site_that_is_frozen_in_part_keeps_what_trains():
    net = model()
    net.blocks[0].site_ffn.fn.requires_grad_(False)
    net.blocks[1].site_ffn.base.requires_grad_(False)
    net.blocks[2].site_ffn.requires_grad_(False)
    found = {path.name: path for path in paths_of(net)}
    for index, kept in ((0, ("base", "scale")), (1, ("fn", "scale")), (2, ())):
        site = net.blocks[index].site_ffn
        for group in ("pre", "post", "res"):
            path = found.get(f"blocks.{index}.site_ffn.{group}")
            pieces = [] if path is None else [piece.parameter for piece in path.pieces]
            assert [id(p) for p in pieces] == [id(getattr(site, name)) for name in kept]


def test_what_layers_share_is_one_path_and_purified_once():
    net = model()
    net.blocks[2].ffn.out.weight = net.blocks[1].ffn.out.weight
    net.blocks[2].site_ffn.fn = net.blocks[1].site_ffn.fn
    found = {path.name: path for path in paths_of(net)}
    assert "blocks.1.ffn.out" in found
    assert "blocks.2.ffn.out" not in found
    views = [(piece.parameter, piece.start) for path in found.values() for piece in path.pieces]
    assert len({(id(p), start) for p, start in views}) == len(views)
    assert [len(found[f"blocks.{i}.site_ffn.post"].pieces) for i in range(3)] == [3, 3, 2]


def expected(path: Path) -> torch.Tensor:
    return torch.cat([p.parameter.grad[p.start : p.stop].flatten() for p in path.pieces if p.parameter.grad is not None])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_norms_are_those_of_all_pieces_together(backend):
    net = model()
    backward(net)
    gradients = PathGradients(paths_of(net))
    gradients.look()
    wanted = [expected(path).double() for path in gradients.paths]
    with use_backend(backend):
        torch.testing.assert_close(gradients.norms(), torch.stack([v.norm() for v in wanted]), rtol=1e-5, atol=0)
        assert torch.equal(gradients.peaks().double(), torch.stack([v.abs().max() for v in wanted]))
    assert not gradients.sharded


def test_views_change_the_gradients_and_missing_ones_count_as_zero():
    net = model()
    backward(net)
    gradients = PathGradients(paths_of(net))
    net.blocks[1].ffn.out.weight.grad = None
    gradients.look()
    index = [path.name for path in gradients.paths].index("blocks.1.ffn.out")
    assert gradients.norms()[index] == 0
    before = net.blocks[0].site_ffn.fn.grad.clone()
    for view in gradients.of([path.name for path in gradients.paths].index("blocks.0.site_ffn.post")):
        view.data.zero_()
    after = net.blocks[0].site_ffn.fn.grad
    assert not after[4:8].any()
    assert torch.equal(after[:4], before[:4])
    assert torch.equal(after[8:], before[8:])


def test_offsets_are_places_in_the_whole_piece():
    net = model()
    backward(net)
    gradients = PathGradients(paths_of(net))
    gradients.look()
    for index, path in enumerate(gradients.paths):
        for piece, view in zip(path.pieces, gradients.of(index), strict=True):
            flat = piece.parameter.grad[piece.start : piece.stop].flatten()
            assert torch.equal(flat[view.offset : view.offset + view.data.numel()], view.data.flatten())
