"""What the tests of real training processes have."""

from tests.unicron.conftest import spec_file, text

__all__ = ["spec_file", "text"]
