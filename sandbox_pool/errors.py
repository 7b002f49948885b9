"""Every way in which the pool can fail a task. None is ever an exit code; all but one are infrastructure.

SandboxError
  + AcquireTimeout          no slot became free in time
  + SandboxLost             the slot or its host is gone
    + StaleLease            the slot was taken back
  + SandboxDestroyed        what ran in the slot destroyed it: the agent's doing, not infrastructure
  + SandboxFileError        a file call was refused (also an OSError)
  + IsolationUnavailable    less isolation than `min_isolation`
  + HostStartFailed         no slot server could be started
    + PlaceUnreachable      the place was never reached: nothing can exist there
  + ScratchFull             no scratch space left
  + ImageError              an image cannot be had or used: no such image, refused, damaged, nothing runs in it
    + LayersMissing         the host lacks layers; the pool sends them and asks again
  + ProtocolError           client and server do not understand each other
  + PoolClosed              the pool is shutting down
  + StateError              the state directory, journal or scratch space cannot be used as it is set
    + JournalDamaged        the journal cannot be read and has to be rebuilt
  + NomadError              (providers/nomad) Nomad refused or did not answer
  + ModalFault              (providers/modal) Modal refused
    + ModalMissing          it does not have what was asked for
    + ModalExists           a sandbox of this name runs already
    + ModalUnanswered       no clear answer
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class SandboxError(Exception):
    """Base of all faults of pool, provider and slot server."""


class AcquireTimeout(SandboxError):
    """No slot became free before the deadline; the message says what the pool was waiting for."""


class SandboxLost(SandboxError):
    """The slot or its host is gone; a command that was running there has no outcome."""


class StaleLease(SandboxLost):
    """The slot was taken back and leased again: the epoch of this lease is over."""


class SandboxDestroyed(SandboxError):
    """What ran in the slot destroyed it, by the word of the kernel: memory filled until its init was killed."""


class IsolationUnavailable(SandboxError):
    """This place cannot isolate slots as well as `min_isolation` demands."""


class HostStartFailed(SandboxError):
    """A provider could not start a slot server."""


class PlaceUnreachable(HostStartFailed):
    """The request to create a host never got to its place, or was refused there: nothing exists under its name."""


class ScratchFull(SandboxError):
    """The scratch space of the slots is full."""


class ImageError(SandboxError):
    """The image of a spec cannot be used; the message says why."""


class LayersMissing(ImageError):
    """A host was asked for a slot with an image whose layers it does not have all."""

    def __init__(self, message: str, layers: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.layers = tuple(layers)


class ProtocolError(SandboxError):
    """Client and slot server do not understand each other: other version, bad token, malformed frame."""


class PoolClosed(SandboxError):
    """The pool is shutting down."""


class StateError(SandboxError):
    """The state directory, the journal or the scratch space cannot be used; the message says what would help."""


class JournalDamaged(StateError):
    """The journal cannot be read; `hermes-rl pool gc --rebuild` sets it aside and starts a new one."""


class SandboxFileError(SandboxError, OSError):
    """A file call was refused by the slot: missing, a directory, no permission, outside. Carries errno and path."""


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """The nearest valid name as a hint, or all names when none is near. Used in every message about an unknown name."""
    names = sorted(valid)
    if near := difflib.get_close_matches(word, names, n=1):
        return f"did you mean {near[0]!r}?"
    return f"valid: {', '.join(names)}" if names else "nothing can be set here"


def first_invalid(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of some settings, in one sentence; an unknown key gets the nearest name."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}; {did_you_mean(place, model.model_fields)}"
    reason = first["msg"].removeprefix("Value error, ")
    return f"{place}: {reason[:1].lower()}{reason[1:]} (got {first['input']!r})" if place else reason
