"""What verifiers, vf-eval and prime-rl load as `hermes-rl-verifiers`: any environment of hermes-rl, by its config."""

from environments.trainers.verifiers_env import HermesHarness, HermesTaskset

__all__ = ["HermesHarness", "HermesTaskset"]
