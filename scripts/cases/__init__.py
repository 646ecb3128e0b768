"""The benchmarks: what they measure and how they report it."""
