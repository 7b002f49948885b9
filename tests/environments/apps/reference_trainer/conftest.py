"""Tiny models compute in no time: what costs is compiling for them, so XLA is told not to try hard."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
