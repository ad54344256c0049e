"""A trained model back from disk, ready to write text: from a run's export, else from its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from laneway.checkpoint import CheckpointStore, load_export, restore
from laneway.connections.gates import restore_gates
from laneway.core import InputError, LanewayError, positive_int
from laneway.data.tokenizer import Tokenizer, load_tokenizer
from laneway.models.gpt import GPT, GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.control_config import ControlConfig
from laneway.train.controls import expect_gates, with_control
from laneway.train.loop import EXPORT
from laneway.train.resume import saved_config
from laneway.train.sample import generate_tokens
from laneway.train.settings import merge


@dataclass(frozen=True)
class Trained:
    """A model with its tokenizer. ``source``: where the weights came from, in words."""

    model: GPT
    tokenizer: Tokenizer
    source: str

    @torch.no_grad()
    def write(self, prompt: str, max_tokens: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0) -> str:
        """The text that follows ``prompt``; an empty prompt starts from a newline.

        Raises:
            InputError: a number out of range, or a prompt that the tokenizer has no token for.
        """
        positive_int("max_tokens", max_tokens)
        positive_int("top_k", top_k, at_least=0)
        if positive_int("seed", seed, at_least=0) >= 2**63:
            raise InputError("seed", seed, "an integer from 0 to below 2**63")
        if not 0 <= temperature < float("inf"):
            raise InputError("temperature", temperature, "a number ≥ 0 (0 is greedy)")
        tokens = self.tokenizer.encode(prompt or "\n")
        if not tokens:
            raise InputError("prompt", prompt, "a text that the tokenizer has tokens for")
        device = self.model.embedding.weight.device
        config = self.model.config
        written = generate_tokens(
            self.model,
            tokens,
            max_tokens=max_tokens,
            context=config.context,
            vocabulary=self.tokenizer.vocab_size,
            device=device,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
        return self.tokenizer.decode(written)


def load_trained(folder: str | Path, device: torch.device) -> Trained:
    """The model of a run directory (its export, else its newest good checkpoint), or of an export's own folder.

    Raises:
        InputError: the folder is neither.
        LanewayError: the run has no weights yet, or its files are damaged.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return _from_export(folder, device)
    run = RunDirectory.open(folder)
    if (folder / EXPORT / "config.json").is_file():
        return _from_export(folder / EXPORT, device)
    return _from_checkpoint(run, device)


def _from_export(folder: Path, device: torch.device) -> Trained:
    tensors, described = load_export(folder)
    config, problems = merge(GPTConfig(), described.get("model", {}))
    if problems or "model" not in described:
        raise LanewayError(f"{folder / 'config.json'} describes no model of this version" + "".join(f"; {p}" for p in problems))
    control, wrong = merge(ControlConfig(), described.get("control", {}))
    if wrong:
        raise LanewayError(f"{folder / 'config.json'} describes no controls of this version" + "".join(f"; {p}" for p in wrong))
    model = with_control(GPT(config), control)
    restore_gates(model, tensors)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise LanewayError(f"{folder}: the weights do not fit the config ({str(error).splitlines()[-1].strip()})") from error
    vocabulary = folder / "tokenizer.json"
    tokenizer = load_tokenizer(str(vocabulary) if vocabulary.is_file() else "byte", str(vocabulary))
    return Trained(model.to(device).eval(), tokenizer, f"export in {folder}")


def _from_checkpoint(run: RunDirectory, device: torch.device) -> Trained:
    config = saved_config(run)
    model = with_control(GPT(config.model), config.control).to(device)
    expect_gates(config.control, model)
    restored = restore(CheckpointStore(run, config.keep_checkpoints), None, model)
    return Trained(model.eval(), load_tokenizer(config.data.tokenizer), f"checkpoint of step {restored.step} in {run.path}")
