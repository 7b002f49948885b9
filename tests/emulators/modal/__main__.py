"""`python -m emulators.modal`: a Modal of our own for other processes, until it is interrupted."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys

from . import Limits, ModalEmulator, TokenBucket, Unavailable


def main() -> int:
    """Print what the clients need in their environment, and serve."""
    parser = argparse.ArgumentParser(prog="python -m emulators.modal", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gvisor", action="store_true", help="run the sandboxes under gVisor's runsc")
    parser.add_argument("--create-delay", type=float, default=0.0, metavar="S", help="seconds until a sandbox runs")
    parser.add_argument("--creates-per-s", type=float, help="throttle creates beyond this rate")
    parser.add_argument("--max-sandboxes", type=int)
    options = parser.parse_args()
    bucket = TokenBucket(options.creates_per_s, max(1.0, options.creates_per_s)) if options.creates_per_s else None
    limits = Limits(create_bucket=bucket, max_sandboxes=options.max_sandboxes, create_delay_s=options.create_delay)
    ended = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)
    try:
        runtime = "gvisor" if options.gvisor else "namespaces"
        with ModalEmulator(runtime=runtime, port=options.port, limits=limits) as emulator:
            for name, value in emulator.environ.items():
                print(f"export {name}={shlex.quote(value)}", flush=True)
            signal.sigwait(ended)
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
