"""Training scripts of one job for several fault-tolerant systems, which ``benchmarks.recovery`` compares."""
