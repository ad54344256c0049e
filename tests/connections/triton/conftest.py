"""The interpreter is chosen before triton is imported: its tests run in a process of their own, by test_triton_kernels.py."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
