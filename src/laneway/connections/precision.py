"""fp8 for the projections of sub-layers, where the device multiplies it. Maps and streams have nothing to do with it.

The maps of a site are fp32 whatever happens (``parameters.py``); sub-layers may be narrower. ``fp8_linear`` rounds input and
weight to e4m3 (4 bits of exponent, 3 of mantissa) with one scale for each whole tensor, taken from its largest value at every
call, multiplies them on the device's fp8 units with fp32 accumulation, and keeps the rounded tensors, one byte a number, for the
backward pass. That is the gradient of the product that was run, in the precision of the incoming gradient; the rounding itself
passes it through.

Bound for each output, but for the rounding of fp32 and of the result:

    |y − x wᵀ| ≤ Σ_k e_x |w| + |x| e_w + e_x e_w,    e = max(2⁻⁴ |·|, 2⁻¹⁰ s)

with s = largest value / 448: half a step of a 3-bit mantissa, and half the smallest step for what e4m3 holds as subnormal.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.core import InputError

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
CAPABILITY = (8, 9)  # of an NVIDIA GPU: the first with fp8 products (Ada; Hopper is 9.0)
MULTIPLE = 16  # what the fp8 product of a GPU wants both dims of a weight to be a multiple of
GIVEN = (torch.float32, torch.bfloat16, torch.float16)


def fp8_missing(device: torch.device | str) -> str | None:
    """None where ``device`` multiplies fp8, else what it lacks, in words.

    The CPU multiplies it as far as this torch does, through wider numbers: right, and no faster.
    """
    device = torch.device(device)
    if device.type == "cuda" and torch.version.cuda:
        have = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)} has compute capability {have[0]}.{have[1]}"
        return None if have >= CAPABILITY else name
    if device.type == "cpu":
        return _cpu_lacks()
    return f"laneway has no fp8 product for {device.type}"


@cache
def _cpu_lacks() -> str | None:
    """None where this torch multiplies fp8 on the CPU, which a product of two small matrices shows."""
    ones, scale = torch.ones(MULTIPLE, MULTIPLE).to(E4M3), torch.ones(())
    try:
        product = torch._scaled_mm(ones, ones.t(), scale_a=scale, scale_b=scale, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):
        return f"torch {torch.__version__} has no fp8 product for the CPU"
    return None if (product == MULTIPLE).all() else f"the fp8 product of torch {torch.__version__} is wrong on this CPU"


def require_fp8(device: torch.device | str) -> None:
    """Raise InputError where ``device`` does not multiply fp8."""
    lacking = fp8_missing(device)
    if lacking:
        accepted = f"a device that multiplies fp8: an NVIDIA GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or later"
        raise InputError("device", str(device), accepted, lacking)


def quantise(t: Tensor) -> tuple[Tensor, Tensor]:
    """t → (t / s in e4m3, s), with s = largest |t| / 448 as an fp32 scalar. Numbers that are not finite make s not finite."""
    wide = t.float()
    scale = (wide.abs().amax() / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


class _Product(torch.autograd.Function):
    """x [M, K], weight [N, K] → x weightᵀ [M, N]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        (x8, sx), (w8, sw) = quantise(x.contiguous()), quantise(weight.contiguous())  # as a GPU's product wants them
        ctx.save_for_backward(x8, sx, w8, sw)
        ctx.given = x.dtype, weight.dtype
        return torch._scaled_mm(x8, w8.t(), scale_a=sx, scale_b=sw, out_dtype=dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[bad-override]  # the decorator hides the parameters' names
        # A second derivative would miss that the rounded factors depend on x and weight: it raises instead.
        x8, sx, w8, sw = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            gx = (grad @ (w8.to(grad.dtype) * sw)).to(ctx.given[0])
            gw = (grad.t() @ (x8.to(grad.dtype) * sx)).to(ctx.given[1])
        return gx, gw, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x wᵀ + b with both factors in e4m3: x [..., K], weight [N, K], bias [N] → [..., N].

    The result has the dtype of x, under autocast that of autocast; the bias is added in it.

    Raises:
        InputError: the device does not multiply fp8, x is neither fp32, bf16 nor fp16, or K or N is no multiple of 16.
    """
    require_fp8(x.device)
    if x.dtype not in GIVEN:
        raise InputError("x", str(x.dtype), "float32, bfloat16 or float16")
    if weight.ndim != 2 or any(size % MULTIPLE for size in weight.shape):
        raise InputError("weight", list(weight.shape), f"[N, K], both multiples of {MULTIPLE}")
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if not x.numel():
        return F.linear(x, weight, bias).to(dtype)
    y = _Product.apply(x.flatten(0, -2) if x.ndim > 1 else x[None], weight, dtype)
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(dtype)


class FP8Linear(nn.Linear):
    """``nn.Linear`` by ``fp8_linear``: the same parameters under the same names, kept as wide as they are."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        return fp8_linear(input, self.weight, self.bias)


def use_fp8(sublayers: nn.Module) -> list[str]:
    """Let the linear projections inside ``sublayers`` (a GPT's ``blocks``, say) run in fp8; returns their names.

    Parameters stay the objects they are, so an optimizer and a checkpoint notice nothing; sites hold no linear projection and
    are left alone. A projection with a dim that is no multiple of 16 stays as it is: its name is not returned.

    Raises:
        InputError: the device of a projection does not multiply fp8; nothing is changed then.
    """
    found = [
        (name, module)
        for name, module in sublayers.named_modules()
        if type(module) is nn.Linear and name and not any(size % MULTIPLE for size in module.weight.shape)
    ]
    for device in {module.weight.device for _, module in found}:
        require_fp8(device)
    for name, module in found:
        narrow = FP8Linear(*module.weight.shape[::-1], bias=module.bias is not None, device="meta")
        narrow.weight, narrow.bias = module.weight, module.bias
        sublayers.set_submodule(name, narrow.train(module.training))
    return [name for name, _ in found]
