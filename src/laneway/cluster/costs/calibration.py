"""The few global constants that formulas can't give: fitted once, or read from a probe file."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from laneway.core import InputError, nearest

__all__ = ["SOURCES", "Calibration"]


@dataclass(frozen=True)
class Calibration:
    """What is reached of nominal rates, and what a kernel costs beside its work; `SOURCES` says where each default is from.

    No constant belongs to one model, size or number of devices.

    Attributes:
        matmul_fraction: share of an A100's peak FLOP/s that a large product reaches; other devices in the ratio of `REACHED`.
        memory_fraction: share of the memory bandwidth that elementwise kernels reach.
        elementwise_factor: bytes of elementwise kernels over those of Megatron's fused ones.
        k_half: inner dimension at which a tile spends half its time on its start and end.
        kernel_s: seconds on the device that a kernel costs beside its work.
        dispatch_s: seconds of host work for one kernel; a layer is never faster than its kernels are dispatched.
        attention_fraction: a fused attention's share of the FLOP/s that a large matrix product reaches.
        flash_attention: attention is one fused kernel that exploits causality and stores no scores.
        network_efficiency: share of a level's bandwidth (as collectives reach it) that is left under a whole step's load.
        overlap_fraction: share of the compute beside a communication that can hide it.
        overlap_slowdown: share by which hidden communication prolongs the compute beside it.
        tensor_overlap: tensor parallelism's messages of the backward pass run beside the products that give gradients of weights.
        crowding: share by which each doubling of the tensor-parallel groups in one node prolongs their messages.
        interference: share by which each further pipeline in a node prolongs a deep pipeline's steady state.
        spread: relative half-width of the interval around compute.
        network_spread: relative half-width of the interval around communication, upwards; half of it downwards.
    """

    matmul_fraction: float = 0.80
    memory_fraction: float = 0.73
    elementwise_factor: float = 1.0
    k_half: float = 32.0
    kernel_s: float = 5e-6
    dispatch_s: float = 45e-6
    attention_fraction: float = 0.60
    flash_attention: bool = True
    network_efficiency: float = 1.0
    overlap_fraction: float = 0.9
    overlap_slowdown: float = 0.1
    tensor_overlap: bool = True
    crowding: float = 1.0
    interference: float = 0.06
    spread: float = 0.1
    network_spread: float = 0.5

    def __post_init__(self) -> None:
        for name in SHARES:
            _number(name, getattr(self, name), 0.0, 1.0, above=name in DIVISORS)
        for name in (
            "elementwise_factor",
            "k_half",
            "kernel_s",
            "dispatch_s",
            "crowding",
            "interference",
            "spread",
            "network_spread",
            "overlap_slowdown",
        ):
            _number(name, getattr(self, name), 0.0, float("inf"))
        for name in ("flash_attention", "tensor_overlap"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"calibration.{name}", getattr(self, name), "true or false")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a probe file: TOML, or JSON by its ending; what it does not name keeps its default.

        Raises:
            InputError: the file can't be read, is malformed, has an unknown key, or a value is out of range.
        """
        path = Path(path).expanduser()
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = f"it can't be read ({getattr(error, 'strerror', None) or error})"
            raise InputError("calibration", str(path), "a TOML or JSON file", why) from error
        try:
            found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError("calibration", str(path), "a TOML or JSON file", str(error)) from error
        return cls.of(found)

    @classmethod
    def of(cls, found: Any) -> Calibration:
        """From a mapping of field names to values; unknown names are refused."""
        if not isinstance(found, dict):
            raise InputError("calibration", found, "names of constants with their values")
        known = [field.name for field in fields(cls)]
        for name in found:
            if name not in known:
                close = nearest(name, known)
                raise InputError("calibration", name, "one of " + ", ".join(known), f"did you mean {close!r}?" if close else None)
        return cls(**found)


FITTED = "fitted on vTrain's published iteration times (A100): the single-node rows and the 3.6B and 39.1B ones, each as a whole"
SOURCES = {
    "matmul_fraction": FITTED,
    "memory_fraction": FITTED,
    "elementwise_factor": "fused kernels; eager PyTorch moves about 2.5 times the bytes, counted by kernel for a Llama layer",
    "k_half": FITTED,
    "kernel_s": FITTED,
    "dispatch_s": f"{FITTED}; Megatron-DeepSpeed's Python and autograd, no CUDA graphs",
    "tensor_overlap": "Megatron-LM since 2022, LinearWithGradAccumulationAndAsyncCommunication; 8 and 16 ranks agree",
    "crowding": f"{FITTED}; the 3.6B rows with two and four tensor-parallel ranks show it; an empirical term",
    "interference": f"{FITTED}; an empirical term, which only the 39.1B rows need",
    "attention_fraction": "Dao 2023, FlashAttention-2, figure 5: forward and backward 190 of 312 TFLOP/s on an A100",
    "flash_attention": "what current frameworks do (PyTorch's scaled_dot_product_attention, Megatron-Core)",
    "network_efficiency": "levels give bandwidths as collectives reach them; vTrain's rows with tp over nodes agree",
    "overlap_fraction": "assumption: the first and last buckets of a pass have nothing beside them",
    "overlap_slowdown": "Galvatron's shipped profile: compute beside communication takes 1.126 times as long, rounded",
    "spread": "about eight of ten of vTrain's published rows lie within the interval",
    "network_spread": "nccl-tests threads (NVIDIA/nccl-tests#283): bus bandwidth dips by a third",
}
"""Where each default comes from."""

SHARES = ("matmul_fraction", "memory_fraction", "attention_fraction", "network_efficiency", "overlap_fraction")
DIVISORS = ("matmul_fraction", "memory_fraction", "attention_fraction", "network_efficiency")


def _number(name: str, given: Any, low: float, high: float, *, above: bool = False) -> None:
    accepted = f"a number {'above' if above else 'from'} {low:g}" + (f" to {high:g}" if high < float("inf") else "")
    if isinstance(given, bool) or not isinstance(given, int | float) or not (low < given if above else low <= given):
        raise InputError(f"calibration.{name}", given, accepted)
    if not (given <= high and given < float("inf")):
        raise InputError(f"calibration.{name}", given, accepted)
