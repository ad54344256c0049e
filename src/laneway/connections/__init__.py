"""Hyper-connections: reference, manifolds, the layer and what watches it."""

from laneway.connections.backends import use_backend
from laneway.connections.chain import StreamChain, block_length
from laneway.connections.consistency import ConsistencyCheck
from laneway.connections.constraint import CurvatureConstraint
from laneway.connections.gates import restore_gates
from laneway.connections.guard import PathNormGuard
from laneway.connections.inspect import StreamProbe
from laneway.connections.layer import HyperConnection, StreamReadout, expand_spread, expand_streams
from laneway.connections.lora import add_lora
from laneway.connections.parameters import param_groups, shard_connections
from laneway.connections.paths import paths_of
from laneway.connections.purify import GradientPurifier
from laneway.connections.scheduler import ConnectionScheduler

__all__ = [
    "ConnectionScheduler",
    "ConsistencyCheck",
    "CurvatureConstraint",
    "GradientPurifier",
    "HyperConnection",
    "PathNormGuard",
    "StreamChain",
    "StreamProbe",
    "StreamReadout",
    "add_lora",
    "block_length",
    "expand_spread",
    "expand_streams",
    "param_groups",
    "paths_of",
    "restore_gates",
    "shard_connections",
    "use_backend",
]
