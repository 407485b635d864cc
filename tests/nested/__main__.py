"""`python -m tests.nested run -- COMMAND`: the command's output and exit status, from inside the nested VM.

Exit status 125: the VM did not come up, or the command did not end. 77: this host cannot run it.
"""

import argparse
import asyncio
import sys

from tests.nested.kernel import supported
from tests.nested.machine import NestedError, Size, run_nested

_UNSUPPORTED, _NOT_RUN = 77, 125


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nested", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    runner = parts.add_parser("run", help="run a command inside")
    runner.add_argument("--deadline", type=float, default=1800, metavar="S", help="seconds the command may take")
    runner.add_argument("--memory", type=int, default=Size.memory_mib, metavar="MIB")
    runner.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if problem := supported():
        print(f"nested: skipped: {problem}", file=sys.stderr)
        return _UNSUPPORTED
    size = Size(memory_mib=arguments.memory)
    try:
        return asyncio.run(run_nested(arguments.command, deadline_s=arguments.deadline, size=size))
    except NestedError as error:
        print(f"nested: {error}", file=sys.stderr)
        return _NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
