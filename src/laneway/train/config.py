"""The dials of a training run. A dataclass sits beside each group of fields and checks itself; the recipes fill them in.

Every field may come from a recipe, a TOML file or a flag (in that order, the later wins) and is named the same in all three:
``optimizer.lr`` is ``lr = …`` under ``[optimizer]`` and ``--optimizer.lr``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from laneway.core import InputError, choice, collect, positive_int, problems_of
from laneway.data.text import TextDataConfig
from laneway.data.text import check as check_text
from laneway.memory.config import LOSSY, MemoryConfig
from laneway.models.gpt import GPTConfig
from laneway.train.control_config import ControlConfig
from laneway.train.reduction_config import ReductionConfig

PRECISIONS = ("fp32", "bf16")
PARALLEL = ("auto", "none", "ddp", "fsdp")

# What a resumed run may change without becoming another run: how often it looks, writes and tells …
CADENCE = frozenset(
    {
        "log_every",
        "probe_every",
        "validate_every",
        "validation_batches",
        "checkpoint_every",
        "keep_checkpoints",
        "sample_prompt",
        "sample_tokens",
        "max_nonfinite",
        "max_failed_checkpoints",
        "failure_timeout",
        "data.cache",
        "data.verify",
        "data.rebuild",
        "control.verify_ranks",
        # Where bytes are: the numbers stay, bit for bit.
        *(f"memory.{field.name}" for field in fields(MemoryConfig) if field.name not in LOSSY),
    }
)
# … and how the same arithmetic is laid out: the curve stays the same to rounding, no longer bit for bit.
LAYOUT = frozenset(
    {
        *("device", "compile", "activation_checkpointing", "recompute_streams", "parallel", "micro_batch_size"),
        *(f"reduction.{name}" for name in ("over", "topology", "chunk_bytes", "shard")),
    }
)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW under a linear warm-up and a cosine that ends at a floor."""

    lr: float = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""
    warmup: float = 0.05
    """Part of the run's steps over which the learning rate rises linearly."""
    floor: float = 0.1
    """Learning rate at the last step, as a fraction of the highest."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; maps, biases, scales, norms and embeddings have none."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def problems(self, prefix: str = "optimizer") -> list[InputError]:
        """Everything that is wrong with these fields, one error a field."""
        return problems_of(self, f"{prefix}.", lambda sound: sound._out_of_range(prefix))

    def _out_of_range(self, prefix: str) -> list[InputError]:
        rules = [
            ("lr", self.lr, 0 < self.lr < math.inf, "a number > 0"),
            ("warmup", self.warmup, 0 <= self.warmup < 1, "a fraction from 0 to below 1"),
            ("floor", self.floor, 0 <= self.floor <= 1, "a fraction from 0 to 1"),
            ("beta1", self.beta1, 0 <= self.beta1 < 1, "a number from 0 to below 1"),
            ("beta2", self.beta2, 0 <= self.beta2 < 1, "a number from 0 to below 1"),
            ("eps", self.eps, 0 < self.eps < math.inf, "a number > 0"),
            ("weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf, "a number ≥ 0"),
            ("clip_norm", self.clip_norm, 0 <= self.clip_norm < math.inf, "a number > 0, or 0 for no clipping"),
        ]
        return [InputError(f"{prefix}.{name}", given, accepted) for name, given, fine, accepted in rules if not fine]


@dataclass(frozen=True)
class TrainConfig:
    """A whole training run: model, data, optimizer, and how the loop goes about it."""

    model: GPTConfig = field(default_factory=GPTConfig)
    """The network."""
    data: TextDataConfig = field(default_factory=TextDataConfig)
    """The text."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What may leave the device."""
    control: ControlConfig = field(default_factory=ControlConfig)
    """What watches over the streams and their gradients."""
    reduction: ReductionConfig = field(default_factory=ReductionConfig)
    """How gradients go over the network."""
    steps: int = 1000
    """Optimizer steps; 0 builds everything, validates once, saves and exports."""
    batch_size: int = 32
    """Sequences in one optimizer step, over all ranks and micro-batches."""
    micro_batch_size: int | None = None
    """Sequences in one forward pass on one rank; None: the rank's whole share. Must divide that share."""
    seed: int = 0
    """Seed of the weights, of the data order and of every generator."""
    precision: str = "fp32"
    """fp32 | bf16: with bf16 the sub-layers compute in bfloat16; parameters, maps and optimizer stay in fp32."""
    device: str = "auto"
    """auto (the accelerator, else the CPU) or a device type such as cpu or cuda."""
    parallel: str = "auto"
    """auto (ddp under torchrun with several ranks, else none) | none | ddp | fsdp"""
    compile: bool = False
    """Compile each block with torch.compile; the first step then takes much longer."""
    activation_checkpointing: bool = False
    """Keep only the input of each block and compute the rest again in the backward pass."""
    recompute_streams: bool = False
    """Keep the streams of every few sites alone and make the others again in the backward pass: post-mixes only, same numbers."""
    log_every: int = 1
    """Steps between metrics rows."""
    probe_every: int = 20
    """Steps between looks into the streams (gain, collapse, …): one extra forward of a micro-batch; 0: never."""
    validate_every: int = 100
    """Steps between validations; there is one at the end in any case. 0: only that one."""
    validation_batches: int = 4
    """Batches of ``batch_size`` sequences that a validation reads, always the same ones; fewer where the text has fewer."""
    checkpoint_every: int = 500
    """Steps between checkpoints; there is one at the end in any case. 0: only that one."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    sample_prompt: str = "def "
    """Start of the text that is written after each validation."""
    sample_tokens: int = 200
    """Tokens written at the end of the run, and a quarter of them after each validation; 0: none."""
    max_nonfinite: int = 10
    """Steps in a row with a non-finite loss or gradient (each is skipped) after which the run stops."""
    max_failed_checkpoints: int = 3
    """Intervals in a row whose checkpoint may fail (a full disk): the run goes on; 0: the first one stops it."""
    failure_timeout: float = 0.0
    """Seconds without a sign of life after which a rank counts as lost, and the run ends on all others; 0: torch's timeouts."""

    def problems(self, world_size: int = 1) -> list[InputError]:
        """Everything that is wrong with the configuration, one error a field, for a run on ``world_size`` ranks."""
        return problems_of(self, "", lambda sound: sound._out_of_range(world_size))

    def _out_of_range(self, world_size: int) -> list[InputError]:
        found = [*self.model.problems("model"), *self.optimizer.problems("optimizer"), *self.memory.problems("memory")]
        found += [*self.control.problems("control"), *self.reduction.problems("reduction")]
        if not found:
            found += collect([lambda: self.control.check_model(self.model)])
        counts = {"steps": 0, "batch_size": 1, "log_every": 1, "keep_checkpoints": 1, "max_nonfinite": 1}
        counts |= dict.fromkeys(("seed", "probe_every", "validate_every", "checkpoint_every", "sample_tokens"), 0)
        counts |= {"validation_batches": 1, "max_failed_checkpoints": 0}
        found += collect([lambda n=name, low=low: positive_int(n, getattr(self, n), low) for name, low in counts.items()])
        found += collect(
            [
                lambda: check_text(self.data),
                lambda: choice("precision", self.precision, PRECISIONS),
                lambda: choice("parallel", self.parallel, PARALLEL),
                lambda: self._check_batch(world_size),
                self._check_seed,
                self._check_prompt,
                self._check_recompute,
                self._check_failure_timeout,
                lambda: self._check_parts(world_size),
                lambda: self._check_reduction(world_size),
            ]
        )
        return found

    def check(self, world_size: int = 1) -> None:
        """Raise the first problem."""
        for problem in self.problems(world_size):
            raise problem

    def micro_batch(self, world_size: int = 1) -> int:
        """Sequences in one forward pass of one rank."""
        return self.micro_batch_size or self.batch_size // world_size

    def _check_recompute(self) -> None:
        if self.recompute_streams and (self.compile or self.activation_checkpointing):
            other = "compile" if self.compile else "activation_checkpointing"
            raise InputError("recompute_streams", True, f"false beside {other}, which decides for whole blocks what is kept")

    def _check_reduction(self, world_size: int) -> None:
        """Levels take several ranks, sharding inside hosts FSDP2, and dropping an all-reduce at the outermost level."""
        reduction = self.reduction
        if not reduction.levels:
            return
        if world_size == 1:
            hint = "start several with torchrun --nproc-per-node N"
            raise InputError("reduction.over", reduction.over, "flat with one process", hint)
        if reduction.shard == "hosts" and self.parallel != "fsdp":
            raise InputError("reduction.shard", "hosts", f"all with parallel = {self.parallel}", "--parallel fsdp")
        if reduction.drop and self.parallel == "fsdp" and reduction.shard == "all":
            raise InputError("reduction.drop", reduction.drop, "0 where fsdp shards over all ranks", "--reduction.shard hosts")

    def _check_parts(self, world_size: int) -> None:
        """Gradients and parameters leave the device only where nobody else looks after them."""
        memory = self.memory
        for name, moved in (("gradients", memory.gradients == "parked"), ("parameters", memory.parameters == "streamed")):
            others = {"replay": memory.replay, "compile": self.compile, f"{world_size} ranks": world_size > 1}
            found = [other for other, there in others.items() if there]
            if moved and memory.on and found:
                hint = "--memory.replay false" if found == ["replay"] else None
                raise InputError(f"memory.{name}", getattr(memory, name), f"resident beside {' and '.join(found)}", hint)

    def _check_seed(self) -> None:
        if isinstance(self.seed, int) and self.seed >= 2**63:
            raise InputError("seed", self.seed, "an integer from 0 to below 2**63")

    def _check_failure_timeout(self) -> None:
        if not (self.failure_timeout == 0 or 1 <= self.failure_timeout < math.inf):
            raise InputError("failure_timeout", self.failure_timeout, "seconds ≥ 1, or 0 for torch's own timeouts")

    def _check_prompt(self) -> None:
        try:
            self.sample_prompt.encode()
        except UnicodeEncodeError:
            raise InputError("sample_prompt", self.sample_prompt, "text that UTF-8 can hold, as config.toml must") from None

    def _check_batch(self, world_size: int) -> None:
        if not (isinstance(self.batch_size, int) and self.batch_size > 0):
            return
        if self.batch_size % world_size:
            raise InputError("batch_size", self.batch_size, f"a multiple of the {world_size} ranks")
        if self.micro_batch_size is None:
            return
        share = self.batch_size // world_size
        if positive_int("micro_batch_size", self.micro_batch_size) > share or share % self.micro_batch_size:
            accepted = f"a divisor of a rank's share, batch_size / ranks = {share}"
            raise InputError("micro_batch_size", self.micro_batch_size, accepted)
