"""A Modal of our own: the unmodified `modal` SDK (1.6.3) talks gRPC to it, and its sandboxes are real processes.

    async with ModalEmulator() as emulator:     # runtime="gvisor": under runsc; raises Unavailable where it is missing
        os.environ.update(emulator.environ)     # before the SDK's first use; in tests use support.modal_sdk instead
        app = await modal.App.lookup.aio("x", create_if_missing=True)
        sandbox = await modal.Sandbox.create.aio("sleep", "infinity", app=app, encrypted_ports=[8000])

or, for other processes, `PYTHONPATH=tests python -m emulators.modal --port 9900 --create-delay 2` prints the exports.

What goes wrong:
    emulator.faults: fail(rpc, status, times=, probability=), throttle(rpc, retry_after_s), lose(rpc),
        delay(rpc, before_s=, after_s=), cut_output(after_bytes), remove(fault), clear();
        `rpc` is a name such as SandboxCreateV2, or a pattern
    emulator.limits: create_bucket = TokenBucket(rate, burst), max_sandboxes, create_delay_s, image_build_s,
        router_token_s, auth_token_s, page_size
    emulator.image_failures["part of a recipe"] = "what the build dies of"; publish("name:tag"); secrets["name"] = {...}
    emulator.accept_credentials(False), expire_tokens() of the workers, expire_auth_tokens() of the control plane
    await emulator.preempt(id), forget(id), set_reach(id, "well" | "hangs" | "refuses"), cut_tunnels(id)
What is seen:
    emulator.calls (Counter by RPC), requests, images, sandboxes (all there ever were), alive (ids), processes(id),
    leaked_processes()

What it is not, and what of it is a guess about the real server: README.md beside this file.
"""

from .backends import Unavailable
from .faults import Fault, Faults, Limits, TokenBucket
from .server import ModalEmulator

__all__ = ["Fault", "Faults", "Limits", "ModalEmulator", "TokenBucket", "Unavailable"]
