"""`laneway train` under the lab's torchrun, whose first start loses a rank or a host once it has made some checkpoints.

netlab_trains.py HOW RUN [flags of laneway train]; HOW: rank (the last rank kills itself), host (the last host dies), replace
(it dies, and begins anew), none.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from laneway.bench.netlab import Context
from laneway.cli import main

KILL_AT = 12
how, out = sys.argv[1], Path(sys.argv[2])
LAST = (1, 0)
# torch tells agents apart by address and process number, which are the same again here: the dead one must be forgotten first.
REPLACE = f"import time; from laneway.bench.netlab import Context; time.sleep(8); Context.attach().start_host(*{LAST})"


def strike(context: Context) -> None:
    """Once, when enough steps are done."""
    rows = out / "metrics" / "rank0.jsonl"
    while not rows.is_file() or len(rows.read_text().splitlines()) < KILL_AT:
        time.sleep(0.005)
    (out.parent / "struck").touch()
    if how == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "replace":
        subprocess.Popen([sys.executable, "-c", REPLACE], start_new_session=True)  # this process ends before that
    context.kill_host(*LAST)


context = Context.attach()
striker = "r1h0" if how == "rank" else "r0h0"
here = (socket.gethostname(), os.environ["LOCAL_RANK"]) == (striker, "0")
if here and how != "none" and not (out.parent / "struck").exists():
    threading.Thread(target=strike, args=(context,), daemon=True).start()
code = main(["train", "--out", str(out), "--resume-or-start", *sys.argv[3:]])
context.report((os.environ["WORLD_SIZE"], code))
sys.exit(code)
