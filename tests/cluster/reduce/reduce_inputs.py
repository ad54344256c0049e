"""What every rank gives, known to all of them, and how far a result may be from the exact sum."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.reduce.bound import error_bound
from laneway.cluster.reduce.scheme import ReductionScheme

HALF_EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
HALF_STEP = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150, torch.float64: 0.0}  # near zero


def all_inputs(length: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """One row a rank, of very different magnitudes; the same on all ranks, whose generators go in step."""
    shape = dist.get_world_size(), length
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (normal * 10.0 ** torch.randint(-3, 4, (length,), generator=generator)).to(dtype)


def allowed(inputs: Tensor, scheme: ReductionScheme, sizes: tuple[int, ...], divisor: int) -> Tensor:
    """The largest error of each element, with the rounding to the tensor's type."""
    wide = inputs.double().abs()
    double = inputs.dtype == torch.float64
    scale = wide.sum(0)
    if any(level.wire == "int8" for level in scheme.levels):
        scale = wide.amax(1).sum().expand_as(scale) if wide.shape[1] else scale
    bound = error_bound(scheme, sizes, double=double) + (2.0**-50 if double else 0)
    exact = inputs.double().sum(0).abs()
    return (scale * bound * (1 + HALF_EPS[inputs.dtype]) + exact * HALF_EPS[inputs.dtype]) / divisor + HALF_STEP[inputs.dtype]


def differs(result: Tensor, inputs: Tensor, scheme: ReductionScheme, sizes: tuple[int, ...], op: str) -> str | None:
    """What is wrong with a result; None where it is within the bound."""
    divisor = dist.get_world_size() if op == "mean" else 1
    exact = inputs.double().sum(0) / divisor
    error = (result.double() - exact).abs()
    if not bool((error <= allowed(inputs, scheme, sizes, divisor)).all()):
        return f"error {error.max():.3g} where {allowed(inputs, scheme, sizes, divisor)[error.argmax()]:.3g} is allowed"
    return None


def same_everywhere(result: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    mine = result.contiguous().view(-1).view(torch.uint8)
    first = mine.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, mine)
