"""The figures of the paper's tables (Tesla V100, CUDA 10).

X. Liu, Y. Liu, Dun, Yin, Yang, Luan, Qian, "Accelerating Sparse Approximate Matrix Multiplication
on GPUs".
"""

RATIOS = (0.30, 0.25, 0.20, 0.15, 0.10, 0.05)
SIZES = (1024, 2048, 4096, 8192, 16384, 32768)

_TAUS = {  # ratio -> by size
    0.30: (1.434815, 1.310666, 1.195803, 1.093354, 0.997847, 0.905539),
    0.25: (1.456555, 1.330525, 1.222981, 1.113983, 1.012852, 0.919156),
    0.20: (1.489164, 1.360312, 1.250158, 1.138739, 1.03536, 0.939582),
    0.15: (1.521774, 1.40003, 1.277335, 1.171746, 1.06537, 0.966816),
    0.10: (1.586993, 1.449676, 1.322631, 1.204753, 1.110386, 1.007668),
    0.05: (1.695691, 1.548969, 1.413222, 1.28727, 1.170407, 1.062136),
}
# Table 1: (size, ratio) -> tau; 0.1 / (|i-j|^0.1 + 1), float32, blocks of 32.
TAU = {(n, ratio): tau for ratio, taus in _TAUS.items() for n, tau in zip(SIZES, taus, strict=True)}

_SPEEDUPS = {  # ratio -> by size: (float32, float16)
    0.30: ((5.7, 4.3), (3.1, 5.2), (1.0, 2.3), (0.9, 1.1), (0.9, 1.3), (1.3, 1.6)),
    0.25: ((6.4, 4.6), (3.6, 5.8), (1.2, 2.9), (1.2, 1.6), (1.0, 1.5), (1.5, 1.8)),
    0.20: ((7.6, 5.2), (4.3, 6.9), (1.5, 3.7), (1.4, 2.0), (1.3, 1.9), (1.8, 2.2)),
    0.15: ((8.7, 5.8), (5.6, 8.7), (1.9, 4.7), (1.9, 2.7), (1.7, 2.5), (2.4, 2.9)),
    0.10: ((10.8, 6.5), (7.6, 11.4), (2.6, 6.8), (2.6, 3.5), (2.7, 3.8), (3.8, 4.5)),
    0.05: ((13.4, 7.6), (11.7, 16.1), (5.0, 11.9), (5.2, 7.0), (4.8, 6.5), (6.8, 7.6)),
}
# Table 2: (precision, size, ratio) -> speedup over cuBLAS on one GPU.
SPEEDUP = {
    (precision, n, ratio): pair[place]
    for place, precision in enumerate(("float32", "float16"))
    for ratio, pairs in _SPEEDUPS.items()
    for n, pair in zip(SIZES, pairs, strict=True)
}

# Table 3: (size, share of nonzeros) -> valid ratio, errors, speedup over cuSPARSE on one GPU.
SPGEMM = {
    (1024, 0.5213): (0.2683, 1020, 996, 232.3),
    (1024, 0.2437): (0.0670, 1324, 1302, 34.6),
    (1024, 0.1091): (0.0187, 1400, 1387, 11.0),
    (8192, 0.5959): (0.1035, 38173, 37090, 589.9),
    (8192, 0.2695): (0.0073, 46340, 46340, 601.0),
    (8192, 0.0212): (0.0028, 46340, 46340, 71.2),
}

# Table 4: (norm of C, error by tau) of the four matrices of 13,656 rows, by number.
SQUARES = {
    1: (755, {1e-10: 0, 1e-8: 1e-6, 1e-6: 9e-5, 1e-4: 0.01139, 1e-2: 1.492293}),
    2: (10406, {1e-10: 0, 1e-8: 1e-6, 1e-6: 8.2e-5, 1e-4: 0.013414, 1e-2: 1.571806}),
    3: (3169858, {1e-10: 0, 1e-8: 0, 1e-6: 3.3e-5, 1e-4: 0.021516, 1e-2: 2.835374}),
    4: (17171990, {1e-10: 0, 1e-8: 0, 1e-6: 3e-6, 1e-4: 0.013709, 1e-2: 2.102697}),
}
# Mean speedup over cuBLAS on one GPU, by tau: of all four, of numbers 1 and 2, of 3 and 4.
SQUARES_SPEEDUP = {1e-10: 1.3, 1e-4: 1.7, 1e-2: 3.0}


# Table 5: (layer, valid ratio) -> points of accuracy, and the speedup over the dense im2col GEMM.
CONVOLUTION = {
    ("conv21", 0.9747): (0.0, 2.8),
    ("conv21", 0.9684): (0.0, 2.8),
    ("conv21", 0.8500): (-0.1, 3.1),
    ("conv21", 0.8290): (-0.1, 3.2),
    ("conv21", 0.6341): (-0.9, 3.9),
    ("conv31", 0.9792): (0.0, 2.6),
    ("conv31", 0.9421): (0.0, 2.6),
    ("conv31", 0.8744): (-0.1, 2.7),
    ("conv31", 0.7436): (-0.1, 3.1),
    ("conv31", 0.4338): (-1.1, 4.8),
}
