"""``load_converted``: what ``save_pretrained`` wrote of a converted model, through transformers' own loader.

The model is built by a subclass of its class whose ``__init__`` converts at the end, so that shards, device maps and dtypes are
the loader's business; afterwards it gets its plain class back, as ``convert`` leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from laneway.connections.convert import FORMAT, Streams, convert, is_converted
from laneway.connections.families import FAMILIES
from laneway.connections.manifolds import Mixture
from laneway.connections.parameters import WIDE, WideParameters
from laneway.core import InputError, LanewayError

LOST = ("missing_keys", "mismatched_keys", "unexpected_keys")
SAVED = "a folder that save_pretrained wrote of a converted model"


def load_converted(path: str | Path, **options: Any) -> Any:
    """Load a converted model that ``model.save_pretrained(path)`` or ``laneway convert`` saved.

    Args:
        path: the folder (or whatever ``from_pretrained`` takes for one).
        options: for ``from_pretrained``: ``dtype``, ``device_map``, ``attn_implementation``, … The maps stay fp32 in a narrow
            dtype.

    Returns:
        A model of the class that was saved, in eval mode as ``from_pretrained`` gives it.

    Raises:
        InputError: there is no such folder, or no converted model in it.
        LanewayError: weights are missing, of another shape, or belong to nothing.
    """
    config, cls = config_and_class(path)
    asked = _streams(path, config)
    for name in ("config", "output_loading_info"):
        if name in options:
            raise InputError(name, "given", "options of from_pretrained but this one", "it is the loader's own here")

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        if not is_converted(self):
            convert(self, **asked)

    # The same name, too: transformers keeps what a class can record by it.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    loader: Any = type(cls.__name__, (cls,), {"__init__": build, **names})
    model, info = loader.from_pretrained(path, config=config, output_loading_info=True, **options)
    model.__class__ = cls
    require_all(path, info)
    for module in model.modules():
        if isinstance(module, Mixture):  # a buffer that is not saved; the loader leaves such ones without values
            module.permutations.copy_(Mixture(module.streams).permutations)
        if isinstance(module, WideParameters) and any(p.dtype not in WIDE for p in module.parameters()):
            raise LanewayError(f"{path}: transformers narrowed the maps; load with dtype='auto' and call model.to(dtype)")
    return model


def config_and_class(path: str | Path, field: str = "path", accepted: str = SAVED) -> tuple[Any, Any]:
    """The config of a saved model of a known family, and the class of transformers that its ``architectures`` names.

    Raises:
        InputError: ``field``: there is no such folder, another family, or no class of that name.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError(field, str(path), accepted, "it needs the package transformers: pip install 'laneway[hf]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InputError(field, str(path), accepted, " ".join(str(error).split())[:200]) from error
    name = (getattr(config, "architectures", None) or [""])[0]
    cls = getattr(transformers, name, None) if name else None
    if config.model_type not in FAMILIES or not isinstance(cls, type):
        given = f"{config.model_type}, {name or 'no architecture'}"
        raise InputError(field, given, f"{accepted} of one of the families {', '.join(FAMILIES)}")
    return config, cls


def _streams(path: str | Path, config: Any) -> dict[str, Any]:
    """The arguments of ``convert`` in the config's section."""
    section = getattr(config, "laneway", None)
    if not isinstance(section, dict):
        raise InputError("path", str(path), SAVED, "its config.json has no section laneway: convert the plain model first")
    known = {field.name for field in fields(Streams)}
    if section.get("format") != FORMAT or set(section) != {"format", *known}:
        raise InputError(f"{path}: laneway", section, f"format {FORMAT} with {', '.join(sorted(known))}")
    return {name: section[name] for name in known}


def require_all(path: str | Path, info: dict[str, Any], kinds: Iterable[str] = LOST) -> None:
    """Raise LanewayError where a weight is missing or left over: one that silently began anew would make another model."""
    for kind in kinds:
        if info[kind]:
            names = sorted(map(str, info[kind]))
            raise LanewayError(f"{path}: {len(names)} {kind.replace('_', ' ')}, first {names[0]}: they don't fit config.json")
