"""Benchmarks: one module a benchmark, one shared timer. They write rows, never prose.

``stats`` (medians, intervals) · ``timer`` (interleaved rounds) · ``memory`` (peak tensor bytes) · ``rows`` (JSON, CSV, machine) ·
``table`` (for people) · ``peers`` (what we compare with) · ``agreement`` (errors, not times) · ``layer``, ``quality``, ``lora``
(``lora_run``: one fine-tune; ``lora_cases``: the mistakes).
"""

from __future__ import annotations

BENCHES = {
    "layer": "one hyper-connection site, forward and backward, against other libraries and the copy-bandwidth floor",
    "quality": "the same training run with different residuals: validation loss, step time, memory, gain",
    "lora": "fine-tunes with a mistake: whether the consistency check says so before the loss does, and its false alarms",
}
