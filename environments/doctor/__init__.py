"""What this machine can do for hermes-rl: one finding per subject, each with the fix where something is missing."""

from environments.doctor.findings import Finding, Status
from environments.doctor.run import examine

__all__ = ["Finding", "Status", "examine"]
