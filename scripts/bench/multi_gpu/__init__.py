"""The parts of bench_multi_gpu.py. The report imports neither torch nor the library."""
