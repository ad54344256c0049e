"""A saved transformers model becomes a saved converted one: all of it, or nothing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from laneway.checkpoint import atomic
from laneway.connections.convert import convert
from laneway.connections.families import FAMILIES
from laneway.connections.layer import HyperConnection
from laneway.connections.load import LOST, config_and_class, require_all
from laneway.core import InputError, LanewayError

PLAIN = "a folder that save_pretrained wrote of a plain model"
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # tokenizer, processor and generation files
WEIGHTS = (".index.json", ".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
TOKENS = 32  # of the random input whose outputs are compared


def convert_folder(source: Path, out: Path, streams: int = 4, manifold: str = "sinkhorn") -> dict[str, Any]:
    """Load the model in ``source``, convert it, and save it with its tokenizer's files to ``out``.

    Both are run on one random input; ``largest_difference`` is that of their first output (logits, or hidden states where there
    is no head), to be read against ``largest_output`` and the dtype.

    Raises:
        InputError: ``source`` is no plain model of a known family, ``out`` exists, or an argument is out of range.
        LanewayError: files are damaged or don't fit, or ``out`` can't be written. Nothing is left of it then.
    """
    if out.exists():
        raise InputError("out", str(out), "a path where nothing is yet")
    if not (source / "config.json").is_file():
        raise InputError("model", str(source), PLAIN, "it holds no config.json")
    with quiet_transformers():
        config, cls = config_and_class(source, "model", PLAIN)
        if hasattr(config, "laneway"):
            raise InputError("model", str(source), PLAIN, "it is converted already")
        model, left_over = _load(source, cls)
        sizes = [sum(p.numel() for p in model.parameters())]
        outputs = [_look(model, inputs := _random_input(model))]
        convert(model, streams, manifold=manifold)
        outputs.append(_look(model, inputs))
        sizes.append(sum(p.numel() for p in model.parameters()))
        _write(model, source, out)
    sites = sum(isinstance(module, HyperConnection) for module in model.modules())
    return {
        "model": str(source),
        "out": str(out),
        "family": config.model_type,
        "class": cls.__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "streams": streams,
        "manifold": manifold,
        "sites": sites,
        "parameters": sizes[0],
        "parameters_added": sizes[1] - sizes[0],
        "largest_output": outputs[0].abs().max().item(),
        "largest_difference": (outputs[1] - outputs[0]).abs().max().item(),
        "left_out": left_over,
    }


def _load(source: Path, cls: Any) -> tuple[Any, list[str]]:
    """The plain model in the dtype it was saved in, and names in the files that belong to nothing."""
    try:
        model, info = cls.from_pretrained(source, output_loading_info=True)
    except SafetensorError as error:
        raise LanewayError(f"{source}: its weights are cut or damaged ({error})") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise LanewayError(f"{source}: {' '.join(str(error).split())[:300]}") from error
    require_all(source, info, LOST[:2])
    return model, sorted(map(str, info["unexpected_keys"]))


def _random_input(model: Any) -> dict[str, Tensor]:
    generator, config = torch.Generator().manual_seed(0), model.config
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(1, config.num_channels, *_pair(config.image_size), generator=generator)
        return {"pixel_values": pixels.to(model.dtype)}
    length = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS))
    return {"input_ids": torch.randint(config.vocab_size, (1, length), generator=generator)}


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


@torch.no_grad()
def _look(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model.eval()(**inputs)[0].double()


def _write(model: Any, source: Path, out: Path) -> None:
    """Beside ``out`` first, flushed to the disk, then renamed."""
    beside = atomic.temporary(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        model.save_pretrained(beside)
        for path in sorted(source.iterdir()):
            wanted = path.is_file() and path.name.endswith(BESIDE) and not path.name.endswith(WEIGHTS)
            if wanted and not (beside / path.name).exists():
                shutil.copyfile(path, beside / path.name)
        for path in beside.iterdir():
            atomic.sync(path)
        atomic.swap_in(out)
    except OSError as error:
        raise LanewayError(atomic.explain(error, out)) from error
    except SafetensorError as error:
        raise LanewayError(f"{out}: the weights could not be written: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and advice of transformers on stderr, which belongs to a command's own lines.

    Raises:
        InputError: transformers is not installed.
    """
    try:
        from transformers.utils import logging
    except ImportError as error:
        hint = "it needs the package transformers: pip install 'laneway[hf]'"
        raise InputError("model", "a folder", f"one of the families {', '.join(FAMILIES)}", hint) from error
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
