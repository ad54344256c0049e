"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, shared memory for every launch of a site.

Launches are not written down a second time: the backend is called with small tensors of the width in question while
``launch.run`` is replaced by a recorder, and each recorded launch is compiled ahead of time for the target with the argument
types, alignments and constants that a GPU would have seen. Nothing of this says how fast a kernel is.

Needs triton, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from laneway.bench.rows import Row
from laneway.core import InputError

CONDITIONS = ((4, 4096, torch.bfloat16), (4, 4096, torch.float32), (8, 4096, torch.bfloat16), (8, 4096, torch.float32))


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel as the backend starts it, and the site's function that does so."""

    function: str
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def rows(
    conditions: Sequence[tuple[int, int, torch.dtype]] = CONDITIONS, *, architecture: int | str = 90, tokens: int = 48
) -> list[Row]:
    """One row a kernel and condition (streams, width, dtype of the streams).

    Args:
        conditions: what to compile for.
        architecture: CUDA compute capability (90 for sm_90), or the name of an AMD GPU ("gfx942"), for which the compiler
            reports registers and spills itself.
        tokens: of the recorded call. The compiled code is the same for any number.

    Raises:
        InputError: in a process that interprets kernels.
    """
    return [
        row(launch, n, width, dtype, architecture)
        for n, width, dtype in conditions
        for launch in distinct(launches(n, width, dtype, tokens), architecture)
    ]


def launches(n: int, width: int, dtype: torch.dtype, tokens: int, *, iterations: int = 20) -> list[Launch]:
    """Every launch of a site's functions, with and without a carried pre-mix, in the order in which they happen."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise InputError("TRITON_INTERPRET", os.environ["TRITON_INTERPRET"], "unset", "interpreted kernels are never compiled")
    from laneway.connections.kernels.triton import launch

    found: list[Launch] = []
    for name, call in _calls(n, width, dtype, tokens, iterations):

        def record(kernel, grid, *arguments, name=name, **options):
            found.append(Launch(name, kernel, arguments, options))

        with mock.patch.object(launch, "run", record):
            call()
    return found


def _calls(n: int, width: int, dtype: torch.dtype, tokens: int, iterations: int) -> Iterator[tuple[str, Any]]:
    """The site's functions, each with inputs of its shapes."""
    from laneway.connections.kernels.triton import backend

    m = n * (n + 2)
    x, f = torch.zeros(tokens, n, width, dtype=dtype), torch.zeros(tokens, width, dtype=dtype)
    maps = torch.zeros(tokens, m)
    r, fn, base, scale = torch.zeros(tokens), torch.zeros(m, n * width), torch.zeros(m), torch.zeros(3)
    forward, backward = (1e-6, 0.0, 8.0, iterations), (0.0, 8.0, iterations)
    site = (fn, base, scale)
    yield "post", lambda: backend.post(x, f, maps)
    yield "post_backward", lambda: backend.post_backward(x, x, f, maps)
    for suffix, carried in (("", None), (", carried", torch.zeros(tokens, n))):
        yield f"pre{suffix}", lambda c=carried: backend.pre(x, c, *site, *forward)
        yield f"cross{suffix}", lambda c=carried: backend.cross(x, f, maps, c, *site, *forward)
        yield f"pre_backward{suffix}", lambda c=carried: backend.pre_backward(x, f, maps, x, c, *site, maps, maps, r, *backward)
        yield (
            f"cross_backward{suffix}",
            lambda c=carried: backend.cross_backward(x, x, f, maps, x, f, maps, x, c, *site, maps, maps, r, *backward),
        )


def distinct(recorded: Sequence[Launch], architecture: int | str) -> list[Launch]:
    """The first of all launches that run the same compiled code."""
    found = {key(launch, architecture): launch for launch in reversed(recorded)}
    return sorted(found.values(), key=recorded.index)


def key(launch: Launch, architecture: int | str) -> str:
    """What triton's own cache tells compiled kernels of one name apart by."""
    signature, constants, attributes, options = _specialise(launch, architecture)
    constants = {k: str(v) for k, v in constants.items()}
    return str((launch.kernel.__name__, signature, constants, sorted(attributes.items()), options))


def _target(architecture: int | str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", architecture, 32) if isinstance(architecture, int) else GPUTarget("hip", architecture, 64)


def _specialise(launch: Launch, architecture: int | str) -> tuple[dict[str, str], dict, dict, dict[str, Any]]:
    """Signature, constants and attributes as triton derives them from the arguments of a launch, and the compiler's options."""
    import triton
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    backend = triton.compiler.make_backend(_target(architecture))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, options = bind(*launch.arguments, **launch.options)
    signature = {p.name: kind for p, (kind, _) in zip(kernel.params, specialisation, strict=True)}
    constants = {(i,): value for i, value in enumerate(bound.values()) if specialisation[i][0] == "constexpr"}
    attributes = {
        (i,): backend.parse_attr(value)
        for i, (kind, value) in enumerate(specialisation)
        if kind != "constexpr" and isinstance(value, str)
    }
    return signature, constants, attributes, dict(options)


def compile_launch(launch: Launch, architecture: int | str) -> Any:
    """The compiled kernel of a launch."""
    import triton
    from triton.compiler import ASTSource

    signature, constants, attributes, options = _specialise(launch, architecture)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=_target(architecture), options=options)


def row(launch: Launch, n: int, width: int, dtype: torch.dtype, architecture: int | str) -> Row:
    """Compiles a launch; what came out. ``architecture`` as for ``rows``."""
    compiled = compile_launch(launch, architecture)
    measured = _nvidia(compiled, architecture) if isinstance(architecture, int) else _amd(compiled)
    return {
        "kernel": launch.kernel.__name__,
        "function": launch.function,
        "streams": n,
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "architecture": f"sm_{architecture}" if isinstance(architecture, int) else architecture,
        "warps": compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared,
        **measured,
    }


def _nvidia(compiled: Any, architecture: int) -> dict[str, int]:
    """Registers a thread, bytes spilled, and matrix instructions, as ptxas and the assembly say."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    suffix = "a" if architecture >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(compiled.asm["ptx"], "utf-8")
        command = [tools / "ptxas", "-v", f"--gpu-name=sm_{architecture}{suffix}", ptx, "-o", cubin]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = _numbers(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    (registers,) = _numbers(r"Used (\d+) registers", said)
    return {
        "registers": registers,
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
        "tf32_products": len(re.findall(r"mma\S*\.tf32", compiled.asm["ptx"])),
        "bf16_products": len(re.findall(r"mma\S*\.bf16", compiled.asm["ptx"])),
    }


def _amd(compiled: Any) -> dict[str, int]:
    """Vector registers a thread and spills, as the compiler's own notes say."""
    notes = compiled.asm["amdgcn"]
    (registers,) = _numbers(r"\.vgpr_count:\s+(\d+)", notes)
    (spilled,) = _numbers(r"\.vgpr_spill_count:\s+(\d+)", notes)
    return {
        "registers": registers,
        "spill_store_bytes": 4 * spilled,
        "spill_load_bytes": 4 * spilled,
        "tf32_products": len(re.findall(r"v_mfma_\S*xf32", notes)),
        "bf16_products": len(re.findall(r"v_mfma_\S*bf16", notes)),
    }


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in what the compiler said: {text[-500:]}")
    return [int(number) for number in found.groups()]
