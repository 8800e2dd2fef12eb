"""What the tests of real training processes have."""

from tests.unicron.conftest import megatron, spec_file, text

__all__ = ["megatron", "spec_file", "text"]
