"""How a network's residual is chosen: what every model but the GPT, which has these fields of its own, begins its fields with."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.connections import HyperConnection, StreamReadout, expand_spread
from laneway.core import InputError, choice, collect, positive_int
from laneway.models.gpt import RESIDUALS


@dataclass(frozen=True)
class StreamConfig:
    """The residual of a network: the same names as in ``GPTConfig``."""

    residual: str = "mhc"
    """residual | hc | mhc | mhc-lite | kronecker | orthogonal | identity"""
    streams: int = 4
    """Residual streams n; 1 is the plain residual."""
    sinkhorn_iterations: int = 20
    """Sinkhorn iterations of mhc."""
    logit_cap: float | None = 8.0
    """H_res logits pass through c·tanh(h/c); None or 0: uncapped."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""

    def problems(self, prefix: str = "model") -> list[InputError]:
        """Everything that is wrong with this configuration, one error a field."""
        found = self._bad_integers(prefix, "streams", "sinkhorn_iterations")
        found += collect([lambda: choice(f"{prefix}.residual", self.residual, RESIDUALS)])
        if not 0 < self.norm_eps < float("inf"):
            found.append(InputError(f"{prefix}.norm_eps", self.norm_eps, "a number > 0"))
        if self.logit_cap is not None and not 0 <= self.logit_cap < float("inf"):
            found.append(InputError(f"{prefix}.logit_cap", self.logit_cap, "a number > 0, or 0 for none"))
        return found or collect([lambda: self.site(1, 0)])

    def check(self) -> None:
        """Raise the first problem."""
        for problem in self.problems():
            raise problem

    def _bad_integers(self, prefix: str, *names: str) -> list[InputError]:
        return collect([lambda name=name: positive_int(f"{prefix}.{name}", getattr(self, name)) for name in names])

    @property
    def used_streams(self) -> int:
        """Streams that the network holds: one for the plain residual."""
        return 1 if self.residual == "residual" else self.streams

    @property
    def spread(self) -> float:
        """What ``expand_streams`` is given. HC copies the embedding; the manifolds use the start of docs/start.md."""
        return 0.0 if self.residual == "hc" else expand_spread(self.used_streams)

    def site(self, dim: int, index: int) -> HyperConnection:
        """Site number ``index`` of the network, over streams of width ``dim``."""
        return HyperConnection(
            dim,
            self.used_streams,
            RESIDUALS[self.residual] or "identity",
            site=index,
            iterations=self.sinkhorn_iterations,
            cap=self.logit_cap or None,
            norm_eps=self.norm_eps,
        )

    def readout(self, dim: int) -> StreamReadout:
        """The end of the streams: a sum for HC, else learned weights that begin as docs/start.md says."""
        return StreamReadout(dim, self.used_streams, "sum" if self.residual == "hc" else "learned")
