"""What a forward pass was: a picture small enough to keep, of every layer and site, on a sample of tokens.

An output [N, W] is kept as its product with a fixed vector of random signs: N numbers whose differences have, on average, the
size of the outputs' own differences (Johnson and Lindenstrauss), and which are equal where the outputs are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from laneway.connections.layer import HyperConnection, Merge, StreamReadout, WatchedMerge

See = Callable[[Tensor, Any], None]
SEED = 2106_09685  # of the signs; any number does, as long as it stays


@dataclass
class Output:
    """An output on the sample: digest [S] in float64, size (root of the sum of squares), dtype, whether all was finite."""

    digest: Tensor
    size: float
    dtype: str
    finite: bool

    def difference(self, other: Output) -> float:
        """Estimated ‖this − other‖ / ‖other‖; 0 where they are equal bit for bit, inf where the shapes differ."""
        if self.digest.shape != other.digest.shape:
            return float("inf")
        if torch.equal(self.digest, other.digest):
            return 0.0
        gap = (self.digest - other.digest).norm().item()
        return gap / max(other.size, 1e-30) if gap == gap else float("inf")


@dataclass
class SiteState:
    """The streams that enter a site, and its maps, on the sample.

    log_rms [S, n], mean [S, n] (over the width, in units of the stream's RMS), similarity [S] (mean cosine of two streams);
    rows, columns: largest |log of a row (column) sum of H_res|, inf for a sum ≤ 0; orthogonal: largest |H Hᵀ − I|.
    """

    log_rms: Tensor
    mean: Tensor
    similarity: Tensor
    rows: float
    columns: float
    orthogonal: float
    dtype: str
    finite: str
    """Empty, or the first of x, h, H_res, f, y that is not finite."""


@dataclass
class Picture:
    """Outputs by name in the order of execution, sites by name; ``""`` is the model's own output."""

    outputs: dict[str, Output] = field(default_factory=dict)
    sites: dict[str, SiteState] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Plain data and tensors."""
        return {
            part: {name: {f.name: getattr(item, f.name) for f in fields(item)} for name, item in getattr(self, part).items()}
            for part in ("outputs", "sites")
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Picture:
        """Undo of ``state``."""
        return cls(
            {name: Output(**item) for name, item in state["outputs"].items()},
            {name: SiteState(**item) for name, item in state["sites"].items()},
        )


class Camera:
    """Takes pictures of a model; the layers are those it had at the beginning, whatever wraps them later.

    Args:
        model: what is called with the sample.
        sample: a tensor, a tuple of arguments or a dict of keywords.
        tokens: how many tokens of an output are kept.
    """

    def __init__(self, model: nn.Module, sample: Any, tokens: int) -> None:
        self.model, self.sample, self.tokens = model, sample, tokens
        kinds = nn.Linear | nn.Embedding | HyperConnection | StreamReadout
        self.layers = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
        self._signs: dict[tuple[int, torch.device], Tensor] = {}

    @torch.no_grad()
    def take(self, extra: dict[nn.Module, See] | None = None) -> Picture:
        """One forward pass in eval mode; ``extra`` sees input and output of further modules."""
        picture, handles, observed = Picture(), [], []
        training = [(module, module.training) for module in self.model.modules()]
        devices = sorted({p.device for p in self.model.parameters() if p.device.type == "cuda"}, key=str)
        try:
            for name, module in self.layers:
                if isinstance(module, HyperConnection) and not module.disabled:
                    handles.append(module.register_forward_hook(self._site_hook(name, module, picture, observed)))
                elif not isinstance(module, HyperConnection):
                    handles.append(module.register_forward_hook(self._output_hook(name, picture)))
            for module, see in (extra or {}).items():
                handles.append(module.register_forward_hook(self._extra_hook(see)))
            self.model.eval()
            with torch.random.fork_rng(devices):
                y = _call(self.model, self.sample)
            picture.outputs[""] = self._output(_tensor(y))
        finally:
            for handle in handles:
                handle.remove()
            for site, observe in observed:
                site.observers.remove(observe)
            for module, mode in training:
                module.training = mode
        return picture

    def picks(self, count: int, device: torch.device) -> Tensor:
        """Which of ``count`` tokens are looked at: evenly spaced."""
        return torch.linspace(0, max(count - 1, 0), min(count, self.tokens), device=device).long()

    def _output_hook(self, name: str, picture: Picture) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, y: Any) -> None:
            if isinstance(y, Tensor):
                picture.outputs[_free(name, picture.outputs)] = self._output(y)

        return hook

    def sampled(self, t: Tensor, dims: int = 1) -> Tensor:
        """[..., the last ``dims`` dims] → the tokens that are looked at, [S, ...]."""
        flat = t.reshape(-1, *t.shape[t.ndim - dims :])
        return flat[self.picks(len(flat), t.device)]

    def _extra_hook(self, see: See) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, y: Any) -> None:
            if isinstance(y, tuple) and isinstance(y[-1], Merge):
                see(y[-1].x, y)  # a site may be given what comes before it in place of streams
            elif args and isinstance(args[0], Tensor):
                see(args[0], y)

        return hook

    def _site_hook(self, name: str, site: HyperConnection, picture: Picture, observed: list[Any]) -> Callable[..., Any]:
        latest: list[Tensor] = []

        def observe(_site: HyperConnection, _x: Tensor, res: Tensor) -> None:
            latest[:] = [res]

        site.observers.append(observe)
        observed.append((site, observe))

        def hook(_module: nn.Module, args: Any, out: tuple[Tensor, Merge]) -> tuple[Tensor, Merge]:
            h, merge = out
            x, res = merge.x, latest[0]
            key = _free(name, picture.sites)
            picture.sites[key] = state = _site_state(self.sampled(x, 2), self.sampled(res, 2), {"x": x, "h": h, "H_res": res})
            picture.outputs[f"{key}:h"] = self._output(h)

            def see(f: Tensor, y: Tensor) -> None:
                state.finite = state.finite or _first_bad({"f": f, "y": y})
                picture.outputs[f"{key}:y"] = self._output(y.flatten(-2))

            return h, WatchedMerge(merge, see)

        return hook

    def _output(self, y: Tensor) -> Output:
        rows = self.sampled(y.detach()).double()
        key = (y.shape[-1], y.device)
        if key not in self._signs:
            generator = torch.Generator().manual_seed(SEED)
            self._signs[key] = (torch.randint(0, 2, (key[0],), generator=generator).double() * 2 - 1).to(y.device)
        return Output((rows @ self._signs[key]).cpu(), rows.norm().item(), str(y.dtype), bool(torch.isfinite(y).all()))


def _site_state(x: Tensor, res: Tensor, watched: dict[str, Tensor]) -> SiteState:
    """x [S, n, C], res [S, out, in]; ``watched``: whole tensors."""
    wide = x.double()
    rms = wide.square().mean(-1).sqrt().clamp_min(1e-30)
    unit, n = torch.nn.functional.normalize(wide, dim=-1), x.shape[-2]
    between = (unit.sum(-2).square().sum(-1) - unit.square().sum((-1, -2))) / max(n * (n - 1), 1)
    wide_res = res.double()
    eye = torch.eye(n, dtype=torch.float64, device=res.device)
    return SiteState(
        log_rms=rms.log().cpu(),
        mean=(wide.mean(-1) / rms).cpu(),
        similarity=between.cpu(),
        rows=_off_one(wide_res.sum(-1)),
        columns=_off_one(wide_res.sum(-2)),
        orthogonal=(wide_res @ wide_res.mT - eye).abs().amax().item() if len(res) else 0.0,
        dtype=str(res.dtype),
        finite=_first_bad(watched),
    )


def _off_one(sums: Tensor) -> float:
    """Largest |log sum|; a sum that is not positive counts as inf."""
    worst = sums.log().abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return worst.amax().item() if worst.numel() else 0.0


def _first_bad(tensors: dict[str, Tensor]) -> str:
    return next((name for name, t in tensors.items() if not torch.isfinite(t).all()), "")


def _free(name: str, taken: dict[str, Any]) -> str:
    """``name``, or with a number where the layer runs more than once in a forward pass."""
    if name not in taken:
        return name
    return next(key for key in (f"{name}#{i}" for i in range(2, len(taken) + 3)) if key not in taken)


def _call(model: nn.Module, sample: Any) -> Any:
    if isinstance(sample, dict):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)


def _tensor(y: Any) -> Tensor:
    """The output itself, ``.logits`` of a transformers output, or the first of a tuple."""
    if isinstance(y, Tensor):
        return y
    return y.logits if hasattr(y, "logits") else y[0]
