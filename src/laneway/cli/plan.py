"""``laneway plan --model-size 175e9 --topology 8xH100_32nodes``: the fastest plan that fits, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from laneway.cli._parse import parse
from laneway.cluster.architecture import Architecture
from laneway.core import InputError, choice
from laneway.strategy.auto import auto_config
from laneway.strategy.flat import compared_with_flat
from laneway.strategy.strategy import Strategy

BASELINES = ("flat",)


@dataclass(frozen=True)
class Plan:
    """Plan the training of a model on a cluster: the fastest layout that fits, predicted, explained and written down."""

    model_size: str | None = None
    """Parameters: 175B, 175e9 or 175_000_000_000."""
    topology: str | None = None
    """8xH100_32nodes, 8xH100_16nodes_4racks@NDR400/400GbE:4, or a TOML file; without it the running cluster is looked at."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="RECIPE")] = None
    """Plan for the model and batch of a recipe instead: tiny | small | gpt2-124m"""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """… changed by a TOML file, as `laneway train --config` takes it."""
    seq_len: int | None = None
    """Tokens of a sequence; 2048, or the recipe's."""
    global_batch: int | None = None
    """Sequences of an optimizer step; by default what models of this size usually have, or the recipe's."""
    streams: int | None = None
    """Residual streams of hyper-connections; 1 is the plain residual."""
    precision: str | None = None
    """Of matrix products: bf16 | fp8 | fp32; bf16, or the recipe's."""
    tp: int | None = None
    """Fix the degree of tensor parallelism."""
    pp: int | None = None
    """Fix the degree of pipeline parallelism."""
    cp: int | None = None
    """Fix the degree of context parallelism."""
    micro_batch: int | None = None
    """Fix the sequences of a micro-batch."""
    probe: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Constants measured on the cluster, instead of the published ones."""
    compare: str | None = None
    """flat: beside everything sharded over all devices by flat collectives, reduced in fp32."""
    write: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the plan, as TOML or (.json) JSON; `laneway train --plan FILE` applies it."""
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE.svg")] = None
    """Write the picture of levels, groups and bytes."""
    export_settings: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write settings of NCCL and gloo that follow from the network: network.env, and nccl_tuner.csv. What you have set stays."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Wrap the model without its weights on as many pretended ranks as the plan has, and say what a rank holds."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One JSON object on stdout."""


def run(args: Sequence[str]) -> int:
    """Plan, then say it, write it, draw it."""
    asked = parse(Plan, args, prog="laneway plan")
    if asked.compare is not None:
        choice("compare", asked.compare, BASELINES)
    plan = make(asked)
    result: dict[str, Any] = {"plan": plan.to_dict()}
    lines = [plan.explain()]
    if asked.compare:
        compared = compared_with_flat(plan)
        result["compare"] = compared.to_dict()
        lines += ["", compared.told()]
    if asked.dry_run:
        result["dry_run"], told = dry(plan)
        lines += ["", told]
    if asked.export_settings is not None:
        result["settings"], told = export(plan, asked.export_settings, here=asked.topology is None)
        lines += ["", told]
    if asked.picture is not None:
        draw(plan, asked.picture)
    if asked.write is not None:
        plan.save(asked.write)
        lines += ["", f"plan in {asked.write}; next: laneway train --plan {asked.write}"]
    print(json.dumps(result) if asked.json else "\n".join(lines))
    return 0


def make(asked: Plan) -> Strategy:
    """The strategy that the flags ask for."""
    fixed = {name: value for name in ("tp", "pp", "cp", "micro_batch") if (value := getattr(asked, name)) is not None}
    options: dict[str, Any] = {
        "seq_len": asked.seq_len,
        "global_batch": asked.global_batch,
        "precision": asked.precision,
        "streams": asked.streams,
    }
    if asked.recipe is not None or asked.config is not None:
        if asked.model_size is not None:
            raise InputError("model_size", asked.model_size, "a size, or a recipe or configuration, not both")
        arch, own = of_recipe(asked)
        options = {name: own.get(name) if value is None else value for name, value in options.items()} | {"arch": arch}
    elif asked.model_size is None:
        raise InputError("model_size", None, "a number of parameters such as 175B, or --recipe NAME")
    if asked.probe is not None:
        from laneway.cluster.costs import Calibration

        options["calibration"] = Calibration.load(asked.probe)
    chosen = {name: value for name, value in options.items() if value is not None}
    return auto_config(asked.model_size, asked.topology, fixed=fixed, **chosen)


def of_recipe(asked: Plan) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a recipe's model, and the recipe's own batch, length, precision."""
    from laneway.recipes import DEFAULT, RECIPES
    from laneway.train.plan import architecture_of
    from laneway.train.settings import merge, read_toml

    settings = RECIPES[choice("recipe", asked.recipe or DEFAULT, RECIPES)]()
    if asked.config is not None:
        settings, problems = merge(settings, read_toml(asked.config))
        for problem in problems:
            raise problem
    own = {"seq_len": settings.model.context, "global_batch": settings.batch_size, "precision": settings.precision}
    return architecture_of(settings.model, settings.control), own


def dry(plan: Strategy) -> tuple[dict[str, Any], str]:
    """Wrap without weights; what it took and what a rank holds."""
    import dataclasses

    from laneway.strategy.dry_run import dry_run

    print(f"wrapping on {plan.world} pretended ranks …", file=sys.stderr)
    done = dry_run(plan.layout, plan.arch, topology=plan.topology, seq_len=plan.seq_len)
    held = f"{done.parameters_on_rank:,} parameters ({done.bytes_on_rank / 1e9:.3g} GB) on a rank"
    took = f"{done.seconds:.1f} s and {done.peak_bytes / 1e9:.3g} GB here"
    return dataclasses.asdict(done), f"dry run on {plan.world} ranks: {held}; it took {took}"


def export(plan: Strategy, folder: Path, *, here: bool) -> tuple[dict[str, Any], str]:
    """Write settings of NCCL and gloo; the variables, those that the user has set, the files, and what to say of them.

    Args:
        plan: whose network.
        folder: for the files.
        here: whether this host is one of the cluster's, so that names of its interfaces are those to use.
    """
    from laneway.cluster.probe.settings import found_interfaces, settings_of

    settings = settings_of(plan.topology, interfaces=found_interfaces() if here else None)
    paths = [str(path) for path in settings.write(folder)]
    kept = {each.name: each.users for each in settings.kept}
    lines = [f"settings in {' and '.join(paths)}", *(f"{name}={value} is yours and stays" for name, value in kept.items())]
    return {"environment": settings.environment, "kept": kept, "files": paths}, "\n".join(lines)


def draw(plan: Strategy, path: Path) -> None:
    """Write the plan's picture."""
    from laneway.report.plan_picture import plan_picture
    from laneway.rundir import replace_file

    if path.suffix != ".svg" or not path.parent.is_dir():
        raise InputError("picture", str(path), "a .svg file in an existing folder")
    try:
        replace_file(path, plan_picture(plan.to_dict()).encode())
    except OSError as error:
        raise InputError("picture", str(path), "a file that can be written", error.strerror) from error
