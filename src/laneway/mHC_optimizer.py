"""The planner under the name that the article about hierarchical computing uses: ``mHC_optimizer.auto_config(...)``."""

from laneway.strategy.auto import auto_config
from laneway.strategy.strategy import Strategy

__all__ = ["Strategy", "auto_config"]
