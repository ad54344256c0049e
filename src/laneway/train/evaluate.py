"""Looks at the model that leave no trace in training: validation loss, a sample of text, a probe of the streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laneway.connections import StreamProbe
from laneway.data.loader import evaluation_batches
from laneway.data.text import Corpus
from laneway.train.config import TrainConfig
from laneway.train.parallel import Parallel
from laneway.train.ranks import Ranks
from laneway.train.sample import generate_tokens
from laneway.train.step import token_loss


@dataclass(frozen=True)
class Evaluator:
    """Every method is called by all ranks together; parameters, generators and the data cursor stay as they were."""

    config: TrainConfig
    parallel: Parallel
    corpus: Corpus
    ranks: Ranks

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the fixed validation batches; raises InputError where the text is too short for one."""
        config, ranks = self.config, self.ranks
        shape = config.model.context, config.batch_size, config.validation_batches
        return evaluation_batches(self.corpus.validation, *shape, ranks.rank, ranks.world_size)

    def validation_loss(self) -> float:
        """Mean loss in nats per token over the fixed validation batches, shared among the ranks; the same on every rank."""
        sums = torch.zeros(2, dtype=torch.float64)
        size = self.config.micro_batch(self.ranks.world_size)
        with self.parallel.looking():
            for inputs, targets in self.batches():
                for inputs_bt, targets_bt in zip(inputs.split(size), targets.split(size), strict=True):
                    logits_btv = self.parallel.model(inputs_bt.to(self.parallel.device))
                    total = token_loss(logits_btv, targets_bt.to(self.parallel.device), reduction="sum")
                    sums += torch.tensor([float(total), targets_bt.numel()], dtype=torch.float64)
        total, count = self.ranks.sum(sums).tolist()
        return total / count

    def probe(self, inputs_bt: Tensor) -> dict[str, Any]:
        """What the streams do in one extra forward of this rank's first micro-batch: ``StreamProbe.summary()``.

        Only rank 0's row shows it, so the other ranks take part only where they must.
        """
        if not (self.ranks.first or self.parallel.shares_forward):
            return {}
        inputs_bt = inputs_bt[: self.config.micro_batch(self.ranks.world_size)].to(self.parallel.device)
        with self.parallel.looking(), StreamProbe(self.parallel.model) as probe:
            self.parallel.model(inputs_bt)
        return probe.summary()

    def sample(self, tokens: int) -> str | None:
        """``tokens`` tokens of text after the configured prompt; None on ranks that need not take part."""
        if not (self.ranks.first or self.parallel.shares_forward):
            return None
        tokenizer = self.corpus.tokenizer
        with self.parallel.looking():
            written = generate_tokens(
                self.parallel.model,
                tokenizer.encode(self.config.sample_prompt or "\n"),
                max_tokens=tokens,
                context=self.config.model.context,
                vocabulary=tokenizer.vocab_size,
                device=self.parallel.device,
                seed=self.config.seed,
            )
        return tokenizer.decode(written)
