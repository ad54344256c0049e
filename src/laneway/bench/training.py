"""One training step, as ``laneway train`` runs it, for benchmarks of whole steps."""

from __future__ import annotations

import torch

from laneway.models.gpt import GPT
from laneway.train.config import TrainConfig
from laneway.train.parallel import parallelise
from laneway.train.ranks import Ranks
from laneway.train.step import Stepper
from laneway.train.workbench import make_optimizer, seed_all

LR = 1e-3


class TrainingStep:
    """Forward, loss, backward, clipping, optimizer: again and again on the same batch of random tokens.

    ``loss`` is that of the last step, ``model`` what is trained.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        seed_all(config.seed)
        self.model = GPT(config.model)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        parallel = parallelise(self.model, config, ranks)
        optimizer = make_optimizer(parallel, config.optimizer)
        self.stepper = Stepper(parallel, optimizer, ranks, config.micro_batch(), config.optimizer.clip_norm)
        tokens = torch.randint(0, config.model.vocab_size, (config.batch_size, config.model.context + 1))
        self.batch, self.loss = (tokens[:, :-1], tokens[:, 1:]), float("nan")

    def __call__(self) -> None:
        """One step. The loss comes back to the host, so the device has done its work when this returns."""
        self.loss = self.stepper(self.batch, LR, False, lambda: None).loss
