"""Plain checkpoints: training state that survives a kill at any byte, and exports that other programs can read.

Read in this order: ``store.py`` (what a checkpoint is and when it becomes one), ``manifest.py`` (how a torn one is told from
a good one), ``atomic.py`` (the order of writes that makes it so), ``tree.py`` (tensors apart from plain data), ``dcp.py``
(torch.distributed.checkpoint, loaded without running pickled code), ``ranks.py`` (one rank's failure is every rank's),
``state.py`` (what to save of a training run) and ``export.py`` (safetensors).
"""

from laneway.checkpoint.export import export, load_export
from laneway.checkpoint.state import Restored, capture, capture_rng, restore, restore_rng
from laneway.checkpoint.store import CheckpointStore
from laneway.checkpoint.tree import PerRank

__all__ = [
    "CheckpointStore",
    "PerRank",
    "Restored",
    "capture",
    "capture_rng",
    "export",
    "load_export",
    "restore",
    "restore_rng",
]
