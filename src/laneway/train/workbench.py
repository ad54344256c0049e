"""Everything a run needs, built in one place and in one order: data, model, parallelism, optimizer."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from laneway.connections import param_groups
from laneway.core import InputError
from laneway.data.loader import BatchLoader
from laneway.data.text import Corpus, prepare
from laneway.models.gpt import GPT
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.controls import with_control
from laneway.train.evaluate import Evaluator
from laneway.train.memory import RunMemory, run_memory
from laneway.train.parallel import Parallel, parallelise
from laneway.train.ranks import Ranks
from laneway.train.step import Stepper


@dataclass(frozen=True)
class Workbench:
    """The parts of a run that hold its state, and the two tools that work on them."""

    corpus: Corpus
    loader: BatchLoader
    parallel: Parallel
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    evaluator: Evaluator
    parameters: int
    memory: RunMemory


def build(config: TrainConfig, ranks: Ranks) -> Workbench:
    """Build the run's parts on this rank; weights are the same on every rank, whatever their number.

    Raises:
        InputError: the text and the model don't fit each other (vocabulary, length), or a field is wrong.
    """
    corpus = ranks.one_by_one_machine(lambda: _prepare(config))
    loader = BatchLoader(corpus.train, config.model.context, config.batch_size, config.seed, ranks.rank, ranks.world_size)
    seed_all(config.seed)
    model = with_control(GPT(config.model), config.control)
    parameters = sum(p.numel() for p in model.parameters())
    parallel = parallelise(model, config, ranks)
    optimizer = make_optimizer(parallel, config.optimizer)
    memory = run_memory(config, parallel, optimizer)
    stepper = Stepper(parallel, optimizer, ranks, config.micro_batch(ranks.world_size), config.optimizer.clip_norm, memory)
    seed_all(config.seed + ranks.rank)
    evaluator = Evaluator(config, parallel, corpus, ranks)
    evaluator.batches()  # too little text must show now, not at the first validation
    return Workbench(corpus, loader, parallel, optimizer, stepper, evaluator, parameters, memory)


def make_optimizer(parallel: Parallel, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameter groups, as one fused kernel where torch has one for the device."""
    groups = param_groups(parallel.model, weight_decay=config.weight_decay)
    fused = parallel.device.type in ("cpu", "cuda", "xpu", "mps")
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)


def seed_all(seed: int) -> None:
    """Seed every generator of this process that training may draw from: python, numpy, torch and its devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _prepare(config: TrainConfig) -> Corpus:
    corpus = prepare(config.data)
    if corpus.tokenizer.vocab_size > config.model.vocab_size:
        accepted = f"at least the tokenizer's {corpus.tokenizer.vocab_size} tokens"
        raise InputError("model.vocab_size", config.model.vocab_size, accepted)
    return corpus
