"""``StreamControl``: what may act on a site's maps between their prediction and their use.

A site with ``site.control = control`` calls it once a forward pass, when its maps are known:

    pre, post, res = control(site, x, pre, post, res)

x […, n, C] are the streams that enter the site, pre and post H_pre and H_post [N, n], res H_res [N, out, in], N all leading dims
of x; maps are in fp32 (float64 for float64 streams). It returns the three, changed, or the very objects that it was given where
it leaves them alone. What each change costs:

    post   a few numbers a token; the fused passes over the streams stay
    res    one more pass in the backward: the streams' gradient through the changed H_res
    pre    the change is mixed and added to h: one more pass forward, and one backward for the weights' gradient (without Sinkhorn
           maps another for the streams'). Equal numbers leave h as it is, bit for bit. A single-pass site leaves h alone: its
           H_pre mixes the next site's

``site.control = None`` is the site without any of this, the same ops and the same bits. A site whose maps are disabled (one
stream) has nothing to control and never calls it. A forward pass may run twice (activation checkpointing): a control must
return the same maps again, and may only overwrite what it notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from laneway.connections import site_ops
from laneway.connections.backends import backend_for
from laneway.connections.ops import _exact, _flat, _fresh, _token
from laneway.core import InputError

if TYPE_CHECKING:
    from laneway.connections.layer import HyperConnection, Merge

Maps = tuple[Tensor, Tensor, Tensor]
Control = TypeVar("Control", bound="StreamControl")


class StreamControl(nn.Module):
    """Base of all controls. Parameters train with the model, buffers go into its checkpoint."""

    def forward(self, site: HyperConnection, x: Tensor, pre: Tensor, post: Tensor, res: Tensor) -> Maps:
        """(H_pre, H_post, H_res) of this pass."""
        raise NotImplementedError

    def check_site(self, site: HyperConnection) -> None:
        """Raise InputError where this control can't act on a site; ``attach`` asks before it puts any on a model."""

    def write_factor(self, site: HyperConnection, x: Tensor) -> Tensor | None:
        """Where all that a pass changes is H_post, stream by stream and alike for all tokens: what the maps are multiplied by,
        [n + n + n²], ones but for H_post's n.

        At a site with Sinkhorn maps that takes one operation, and ``forward`` isn't called. None: ``forward`` is.
        """
        return None


class ControlStack(StreamControl):
    """Several controls in a fixed order, each given what the one before returned.

    Raises:
        InputError: no control, or something that is none.
    """

    def __init__(self, controls: Iterable[StreamControl]) -> None:
        super().__init__()
        given = list(controls)
        if not given or not all(isinstance(control, StreamControl) for control in given):
            raise InputError("controls", [type(control).__name__ for control in given], "one or more StreamControl")
        self.controls = nn.ModuleList(given)

    def check_site(self, site: HyperConnection) -> None:
        """Raise InputError where one of them can't act on a site."""
        for control in control_parts(self):
            control.check_site(site)

    def forward(self, site: HyperConnection, x: Tensor, pre: Tensor, post: Tensor, res: Tensor) -> Maps:
        """(H_pre, H_post, H_res) of this pass."""
        for control in self.controls:
            pre, post, res = control(site, x, pre, post, res)
        return pre, post, res


def controlled_sites(model: nn.Module) -> list[HyperConnection]:
    """The sites of a model that a control can act on, in the order of its modules: those with maps."""
    from laneway.connections.layer import HyperConnection

    return [module for module in model.modules() if isinstance(module, HyperConnection) and not module.disabled]


def require_sites(model: nn.Module) -> list[HyperConnection]:
    """The same; raises InputError where there is none."""
    if sites := controlled_sites(model):
        return sites
    raise InputError("model", type(model).__name__, "a model with hyper-connections of two or more streams")


def attach(model: nn.Module, make: Callable[[HyperConnection, int], Control]) -> list[Control]:
    """Give every site with maps a control, ``make(site, its place)``, after any it has; returns them in that order.

    Raises:
        InputError: the model has no site with maps, or a site on which its control can't act.
    """
    sites = require_sites(model)
    made = [make(site, place) for place, site in enumerate(sites)]
    for site, control in zip(sites, made, strict=True):
        control.check_site(site)
    for site, control in zip(sites, made, strict=True):
        before = site.control
        site.control = control if before is None else ControlStack([*control_parts(before), control])
    return made


def detach(model: nn.Module, controls: Iterable[StreamControl] | None = None) -> None:
    """Take ``controls``, or all of them, off the sites of a model."""
    gone = None if controls is None else {id(control) for control in controls}
    for site in controlled_sites(model):
        control = site.control
        if control is None:
            continue
        left = [part for part in control_parts(control) if gone is not None and id(part) not in gone]
        site.control = None if not left else left[0] if len(left) == 1 else ControlStack(left)


def control_parts(control: nn.Module | None) -> list[StreamControl]:
    """The controls of a stack, in their order; a single control; nothing for None."""
    stacked = control.controls if isinstance(control, ControlStack) else [control]
    return [part for part in stacked if isinstance(part, StreamControl)]


def apply_control(site: HyperConnection, x: Tensor, h: Tensor, merge: Merge) -> Tensor:
    """Let the site's control change what ``merge`` holds; returns h, with the change of H_pre mixed in."""
    n = site.streams
    if merge.maps is None:
        pre, post, res = merge.pre_map, merge.post, merge.res
    elif site.control is not None and (factor := site.control.write_factor(site, x)) is not None:
        merge.maps = merge.maps * factor.to(merge.maps.dtype)
        return h
    else:  # split: its backward is one operation
        pre, post, res = merge.maps.split([n, n, n * n], 1)
        res = res.unflatten(1, (n, n))
    if site.control is None or pre is None or post is None or res is None:
        return h
    with torch.autocast(x.device.type, enabled=False):
        new_pre, new_post, new_res = site.control(site, x, pre, post, res)
        for name, new, old in (("pre", new_pre, pre), ("post", new_post, post), ("res", new_res, res)):
            if new.shape != old.shape or new.dtype != old.dtype:
                given = f"{name} {list(new.shape)} {new.dtype}"
                raise InputError(f"{type(site.control).__name__}(…)", given, f"{list(old.shape)} {old.dtype}, as it was given")
        if new_pre is pre and new_post is post and new_res is res:
            return h
        _hand_on(merge, new_pre, new_post, new_res, moved=new_res is not res)
        if new_pre is pre or site.single_pass:
            return h
        if merge.read is not None:
            return site_ops.mhc_read(h, x, pre, new_pre, merge.read)
        return add_read(h, x, new_pre - pre)


def _hand_on(merge: Merge, pre: Tensor, post: Tensor, res: Tensor, moved: bool) -> None:
    """Give the merge its new maps. Where the ops of a whole site serve, the pre's backward multiplies the streams' gradient with
    the H_res that it predicted, so that another H_res needs another way for that gradient.
    """
    if merge.maps is None:
        merge.post_map, merge.res_map = post, res
        return
    merge.maps = torch.cat([pre, post, res.flatten(1)], dim=1)
    if moved:
        merge.carry = res_token(merge.x, res)


@torch.library.custom_op("laneway::add_read", mutates_args=())
@_exact
def add_read(h: Tensor, x: Tensor, change: Tensor) -> Tensor:
    """h + Σ_i change_i x_i: h […, C], x […, n, C], change [N, n] → […, C], summed in change's precision. Keeps x as it is."""
    return site_ops.mixed_anew(h, x, change)


@add_read.register_fake
def _(h, x, change):
    return _fresh(h)


def _read_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:])


def _read_vjp(ctx, gh):
    """In torch's own operations, which have a derivative. The streams' gradient is a product of numbers, one pass."""
    x, change = ctx.saved_tensors
    with torch.autocast(x.device.type, enabled=False):
        wide = gh.to(change.dtype).reshape(-1, 1, x.shape[-1])
        gx = (change.unsqueeze(-1) * wide).to(x.dtype).view(x.shape) if ctx.needs_input_grad[1] else None
    return gh, gx, site_ops.read_gradient(gh, x, change.dtype)


add_read.register_autograd(_read_vjp, setup_context=_read_setup)


@torch.library.custom_op("laneway::res_token", mutates_args=())
@_exact
def res_token(x: Tensor, res: Tensor) -> Tensor:
    """A carry whose gradient gy reaches x […, n, C] as H_resᵀ gy, res [N, out, in]. It holds no numbers, and keeps no x."""
    return _token(x)


@res_token.register_fake
def _(x, res):
    return torch.empty_strided(x.shape, [0] * x.ndim, dtype=x.dtype, device=x.device)


@torch.library.custom_op("laneway::res_token_backward", mutates_args=())
@_exact
def res_token_backward(gy: Tensor, res: Tensor) -> Tensor:
    """H_resᵀ gy, […, n, C]."""
    rows = _flat(gy, 2)
    maps = pad(res.mT.flatten(1), (2 * gy.shape[-2], 0))  # writes nothing: a post-mix of the gradient alone
    return backend_for(rows).post(rows, rows.new_zeros(len(rows), gy.shape[-1]), maps).view(gy.shape)


@res_token_backward.register_fake
def _(gy, res):
    return _fresh(gy)


def _token_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])


def _token_vjp(ctx, gy):
    return res_token_backward(gy, ctx.saved_tensors[0]), None


def _token_backward_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _token_backward_vjp(ctx, ggx):
    gy, res = ctx.saved_tensors
    rows, other = (t.reshape(res.shape[0], *gy.shape[-2:]).to(res.dtype) for t in (gy, ggx))
    return (res @ other).to(gy.dtype).view(gy.shape), rows @ other.mT


res_token.register_autograd(_token_vjp, setup_context=_token_setup)
res_token_backward.register_autograd(_token_backward_vjp, setup_context=_token_backward_setup)
