"""What this machine can do for hermes-rl: one finding per subject, each with the fix where something is missing."""

from environments.apps.doctor.examine import examine
from environments.apps.doctor.findings import Finding, Status

__all__ = ["Finding", "Status", "examine"]
