"""The whole system, out of real parts."""
