"""``laneway bench NAME [--quick] [--json] [--save [DIR]] …``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from laneway.bench import BENCHES
from laneway.cli._bench_adaptation import adaptation_job
from laneway.cli._bench_collectives import collectives_job, prediction_job
from laneway.cli._bench_controls import controls_job
from laneway.cli._bench_dropping import dropping_job
from laneway.cli._bench_job import Job, job_of
from laneway.cli._bench_quality import quality_job, stability_job
from laneway.cli._bench_scheduling import scheduling_job
from laneway.cli._bench_simulated import planner_job, policies_job
from laneway.cli._bench_soak import soak_job
from laneway.cli._bench_symptoms import symptoms_job
from laneway.cli._parse import parse
from laneway.core import InputError, choice

Flag = tyro.conf.FlagCreatePairsOff


def run(args: Sequence[str]) -> int:
    """Run one benchmark and show, print or save its rows."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: laneway bench NAME [--quick] [--json] [--save [DIR]]\n")
        print("\n".join(f"  {name:<10} {what}" for name, what in BENCHES.items()))
        print("\n`laneway bench NAME --help` shows the rest.")
        return 0
    name = choice("bench", args[0], BENCHES)
    job = parse(COMMANDS[name], _bare_save(args[1:]), prog=f"laneway bench {name}")
    from laneway.bench.rows import results_folder
    from laneway.bench.table import show

    folder = None if job.save is None else results_folder(job.save)
    report = job.work(lambda line: print(line, file=sys.stderr, flush=True))
    if job.json:
        print(json.dumps(report.as_json(), allow_nan=False))
    else:
        show(report)
    for path in [] if folder is None else report.save(folder):
        print(f"saved to {path}", file=sys.stderr)
    return 0


def _bare_save(args: Sequence[str]) -> list[str]:
    """``--save`` alone means the checkout's benchmarks/results; tyro wants a value."""
    found = list(args)
    for index, word in enumerate(args):
        if word == "--save" and (index + 1 == len(args) or args[index + 1].startswith("-")):
            found[index] = "--save="
    return found


def _layer(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    dtype: tuple[str, ...] = ("fp32", "bf16"),
    shape: tuple[str, ...] = (),
    threads: tuple[int, ...] = (1, 0),
    compile: bool = True,
    allocator: str = "default",
    seconds: float = 20.0,
) -> Job:
    """One hyper-connection site, forward and backward, against other libraries and the copy-bandwidth floor.

    Args:
        quick: at most 60 s on 2 cores: the first shape, eager variants, few rounds.
        json: one JSON object on stdout.
        save: append the rows to DIR/layer.csv; without DIR to benchmarks/results of the source checkout.
        dtype: fp32 and / or bf16.
        shape: TOKENSxDIM, one or more; by default 2048x512 2048x2048 8192x1024 512x4096.
        threads: numbers of threads; 0 is all.
        compile: also the variants under torch.compile.
        allocator: default, or tuned: memory that was freed stays with the process, for every variant.
        seconds: time budget of the rounds of one shape and dtype.
    """
    from laneway.bench import layer

    shapes = tuple(map(_shape, shape)) or layer.SHAPES
    options = layer.LayerOptions(shapes, dtype, threads, compile, allocator, seconds)
    return job_of(layer, options, quick, json, save)


def _shape(text: str) -> tuple[int, int]:
    tokens, _, dim = text.partition("x")
    if not (tokens.isdigit() and dim.isdigit()):
        raise InputError("shape", text, "TOKENSxDIM, such as 2048x512")
    return int(tokens), int(dim)


def _memory(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    models: tuple[str, ...] = ("gpt", "llama"),
    dtype: tuple[str, ...] = ("fp32", "bf16"),
    budgets: tuple[float, ...] = (0.63, 0.5),
    tables: tuple[str, ...] = ("steps", "virtual", "spikes", "batches", "solver"),
    peers: tuple[str, ...] = ("checkpoint", "selective", "save_on_cpu", "torch_save"),
    equal_peak: tuple[str, ...] = ("checkpoint", "compile"),
    states: tuple[str, ...] = ("streamed", "8bit", "4bit", "streamed-8bit"),
    totals: tuple[float, ...] = (0.4,),
    virtual: tuple[float, ...] = (200.0,),
    spikes: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.5),
    folder: str = "",
    size: str = "full",
    seconds: float = 120.0,
) -> Job:
    """A training step under a budget of memory, against plain training, checkpointing and other ways to need less.

    Args:
        quick: at most 60 s on 2 cores: a smaller network, one model, one budget, one peer, nothing compiled.
        json: one JSON object on stdout.
        save: append the rows to DIR/memory*.csv; without DIR to benchmarks/results of the source checkout.
        models: gpt and / or llama.
        dtype: fp32 and / or bf16 (autocast).
        budgets: as parts of plain training's peak.
        tables: steps (memory.csv), virtual, spikes, batches, solver.
        peers: checkpoint, selective, save_on_cpu, torch_save, at the peak they have.
        equal_peak: checkpoint and / or compile: their dials turned until the peak is that of the budgets.
        states: how the optimizer's state is held: streamed, 8bit, 4bit, streamed-8bit, streamed-4bit.
        totals: budgets for managed steps with those states, as parts of plain training's peak.
        virtual: bandwidths of simulated tiers, MB/s.
        spikes: steps of so many times the length under a hard limit, up to 6.
        folder: of the disk tier's file; by default that of temporary files.
        size: of the network and batch: full, half, small, quick. bf16 wants small on a CPU without bf16 instructions.
        seconds: time budget of the rounds of a model and dtype.
    """
    from laneway.bench import tiered

    options = tiered.MemoryOptions(
        models, dtype, tables, budgets, peers, equal_peak, states, totals, virtual, folder, seconds, spikes, tiered.sized(size)
    )
    return job_of(tiered, options, quick, json, save)


def _modalities(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    modalities: tuple[str, ...] = ("vit", "convnet", "image_text"),
    variants: tuple[str, ...] = ("residual", "mhc"),
    seeds: int = 3,
    steps: int = 300,
    threads: int = 0,
) -> Job:
    """Images, and images with text, with and without hyper-connections: accuracy on held-out digits, step time.

    Args:
        quick: at most 60 s on 2 cores: one seed, at most 40 steps, one thread.
        json: one JSON object on stdout.
        save: append the rows to DIR/modalities.csv; without DIR to benchmarks/results of the source checkout.
        modalities: vit, convnet, image_text.
        variants: names; residual must be among them. Any residual of the model.
        seeds: seeds 0 … N−1.
        steps: optimizer steps of each run.
        threads: number of threads; 0 is all.
    """
    from laneway.bench import modalities as bench

    options = bench.ModalityOptions(modalities, variants, seeds, steps, threads)
    return job_of(bench, options, quick, json, save)


def _precision(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    variants: tuple[str, ...] = ("residual", "mhc"),
    dim: int = 256,
    layers: int = 4,
    threads: int = 0,
    seconds: float = 60.0,
) -> Job:
    """A whole training step in fp32 and under bf16 autocast: how many times faster, and on which instructions.

    Args:
        quick: at most 60 s on 2 cores: a narrow network, few rounds.
        json: one JSON object on stdout.
        save: append the rows to DIR/precision.csv; without DIR to benchmarks/results of the source checkout.
        variants: names; any residual of the model.
        dim: width of one stream.
        layers: blocks of the network.
        threads: number of threads; 0 is all.
        seconds: time budget of the rounds.
    """
    from laneway.bench import precision

    options = precision.PrecisionOptions(variants, dim=dim, layers=layers, threads=threads, seconds=seconds)
    return job_of(precision, options, quick, json, save)


def _hf(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    models: tuple[str, ...] = ("deepseek_v4", "glm5_next", "hy_v4"),
    dtype: tuple[str, ...] = ("fp32",),
    dim: int = 512,
    layers: int = 2,
    time: int = 512,
    threads: int = 0,
) -> Job:
    """Training steps of transformers' hyper-connection models: as they are, accelerated, and with plain residuals.

    Args:
        quick: at most 60 s on 2 cores: two narrow layers, few rounds, one thread.
        json: one JSON object on stdout.
        save: append the rows to DIR/hf.csv; without DIR to benchmarks/results of the source checkout.
        models: deepseek_v4, glm5_next, hy_v4.
        dtype: fp32 and / or bf16, which most CPUs are slow at.
        dim: width of one stream.
        layers: decoder layers, two sites each.
        time: tokens of the sequence.
        threads: number of threads; 0 is all.
    """
    from laneway.bench import hf

    options = hf.HFOptions(models=models, dtypes=dtype, dim=dim, layers=layers, time=time, threads=threads)
    return job_of(hf, options, quick, json, save)


def _convert(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    seeds: int = 3,
    pretrain_steps: int = 300,
    steps: int = 100,
    lr: float = 3e-3,
    lr_maps: float = 1e-2,
    streams: int = 4,
    threads: int = 1,
) -> Job:
    """A small Llama of transformers, pretrained here, goes on training: plain, converted with its maps alone, converted whole.

    Args:
        quick: at most 60 s on 2 cores: a very small network and few steps.
        json: one JSON object on stdout.
        save: append the rows to DIR/convert.csv; without DIR to benchmarks/results of the source checkout.
        seeds: seeds 0 … N−1: weights, and the order of the text.
        pretrain_steps: optimizer steps of the plain model before it is converted.
        steps: optimizer steps of each variant after that.
        lr: highest learning rate where all weights train (plain and mhc_all).
        lr_maps: highest learning rate where the maps alone train (mhc_maps).
        streams: residual streams of the converted models.
        threads: number of threads; 0 is all.
    """
    from laneway.bench import convert

    given = {"seeds": seeds, "pretrain_steps": pretrain_steps, "steps": steps, "streams": streams, "threads": threads}
    options = convert.ConvertOptions(**given, lr=lr, lr_maps=lr_maps)
    return job_of(convert, options, quick, json, save)


def _lora(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    cases: tuple[str, ...] = (),
    held_out: bool = True,
    seeds: int = 5,
    steps: int = 30,
    threads: int = 1,
) -> Job:
    """Fine-tunes with a mistake: whether the consistency check says so before the loss does, and its false alarms.

    Args:
        quick: at most 60 s on 2 cores: a handful of mistakes, a very small network, few steps.
        json: one JSON object on stdout.
        save: append the rows to DIR/lora.csv; without DIR to benchmarks/results of the source checkout.
        cases: names of mistakes; empty for all.
        held_out: also the mistakes that were kept out of the check's development.
        seeds: healthy runs of the usual setting; other settings have two fewer.
        steps: optimizer steps of each fine-tune.
        threads: number of threads; 0 is all.
    """
    from laneway.bench import lora

    options = lora.LoRAOptions(cases=cases, held_out=held_out, seeds=seeds, steps=steps, threads=threads)
    return job_of(lora, options, quick, json, save)


def _step(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    variants: tuple[str, ...] = ("residual", "mhc", "mhc_unchained", "mhc_torch"),
    dtype: tuple[str, ...] = ("fp32", "bf16"),
    layers: int = 12,
    dim: int = 512,
    context: int = 512,
    batch_size: int = 2,
    threads: int = 0,
    allocator: str = "tuned",
    seconds: float = 100.0,
) -> Job:
    """A whole training step with hyper-connections over the same step with plain residuals.

    Args:
        quick: at most 60 s on 2 cores: two narrow layers, few rounds, one thread.
        json: one JSON object on stdout.
        save: append the rows to DIR/step.csv; without DIR to benchmarks/results of the source checkout.
        variants: residual, mhc, mhc_recompute, mhc_unchained, mhc_torch.
        dtype: fp32 and / or bf16.
        layers: blocks of the network, two sites each.
        dim: width of one stream.
        context: tokens of a sequence.
        batch_size: sequences of a step.
        threads: number of threads; 0 is all.
        allocator: tuned (freed memory stays with the process) or default.
        seconds: time budget of the rounds of one dtype.
    """
    from laneway.bench import step

    sizes = {"layers": layers, "dim": dim, "context": context, "batch_size": batch_size, "threads": threads}
    options = step.StepOptions(variants, dtype, **sizes, allocator=allocator, seconds=seconds)
    return job_of(step, options, quick, json, save)


COMMANDS = {
    "layer": _layer,
    "step": _step,
    "memory": _memory,
    "quality": quality_job,
    "stability": stability_job,
    "symptoms": symptoms_job,
    "controls": controls_job,
    "modalities": _modalities,
    "precision": _precision,
    "hf": _hf,
    "lora": _lora,
    "convert": _convert,
    "policies": policies_job,
    "soak": soak_job,
    "planner": planner_job,
    "scheduling": scheduling_job,
    "adaptation": adaptation_job,
    "collectives": collectives_job,
    "dropping": dropping_job,
    "prediction": prediction_job,
}
