"""``laneway VERB …``: one verb a file. A verb's module is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys

from laneway import __version__
from laneway.core import LanewayError, nearest

VERBS = {
    "train": "train a language model on text",
    "generate": "write text with a trained model",
    "convert": "turn a saved transformers model into one with hyper-connections",
    "plan": "plan the training of a model on a cluster",
    "report": "draw one or more runs as a single HTML file",
    "validate": "check a configuration file, field by field",
    "doctor": "look at this machine, or at a run, and say what to change",
    "build": "compile the CPU kernels for this machine",
    "bench": "measure; `laneway bench` lists what",
}


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {what}" for name, what in VERBS.items())
    hint = "`laneway VERB --help` shows a verb's options; `laneway --version` the version."
    return f"usage: laneway VERB [options]\n\n{verbs}\n\n{hint}"


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 1 the run failed, 2 bad input (one line), 130 interrupted, 141 pipe closed."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if args[0] == "--version":
        print(f"laneway {__version__}")
        return 0
    verb, rest = args[0], args[1:]
    if verb not in VERBS:
        close = nearest(verb, VERBS)
        hint = f"; did you mean {close!r}?" if close else ""
        print(f"laneway: verb: got {verb!r}; accepted: {', '.join(VERBS)}{hint}", file=sys.stderr)
        return 2
    try:
        code = importlib.import_module(f"laneway.cli.{verb}").run(rest) or 0
        sys.stdout.flush()
        return code
    except LanewayError as error:
        print(f"laneway {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has seen enough: `laneway bench … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains again at its end
        return 141
    except KeyboardInterrupt:
        print(f"laneway {verb}: interrupted", file=sys.stderr)
        return 130
