"""Benchmarks: one module a benchmark, one shared timer. They write rows, never prose.

``stats`` (medians, intervals) · ``timer`` (interleaved rounds) · ``memory`` (peak tensor bytes) · ``rows`` (JSON, CSV, machine) ·
``table`` (for people) · ``peers`` (what we compare with) · ``agreement`` (errors, not times); the others are benchmarks, some
with a module of what they need beside them.
"""

from __future__ import annotations

BENCHES = {
    "layer": "one hyper-connection site, forward and backward, against other libraries and the copy-bandwidth floor",
    "hf": "training steps of transformers' hyper-connection models, as they are and with accelerate_hf",
    "step": "a whole training step with hyper-connections over the same step with plain residuals",
    "memory": "a training step under a budget of memory, against plain training, checkpointing and other ways to need less",
    "quality": "the same training run with different residuals: validation loss, step time, memory, gain",
    "stability": "which residual and which mechanism keeps a run alive: divergence, composite gain, recovery after faults",
    "symptoms": "runs that go wrong on purpose: what doctor finds, and whether the knob that it names cures them",
    "controls": "what controls of streams and gradients cost, beside the hyper-connections alone and over several ranks",
    "modalities": "images, and images with text, with and without hyper-connections: accuracy, step time",
    "precision": "a training step in fp32 and under bf16 autocast: how many times faster, on which instructions",
    "convert": "a pretrained Llama goes on training: plain, converted with its maps alone, converted as a whole",
    "soak": "training of varying length under a memory limit, with spikes, NaN, kills, a full disk, damage: managed, unmanaged",
    "policies": "eviction policies on recorded training steps in a simulated device: stall, overhead, bytes moved",
    "planner": "the cost model on published step times, per model size; claims simulated on stated networks",
    "scheduling": "where tasks run, decided before each step, against fixed choices, on a network whose load moves",
    "adaptation": "a link that gets slow in the middle of a run and well again: what is done about it, and how soon",
    "lora": "fine-tunes with a mistake: whether the consistency check says so before the loss does, and its false alarms",
    "prediction": "how well small messages foretell the time of every reduction at every size, on the same network",
    "dropping": "gradients that stay at home: validation loss and bytes, with and without error feedback",
    "collectives": "reductions over the levels of a network of several hosts on this machine, against flat ones: times, bytes",
}
