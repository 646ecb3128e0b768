"""What only the CPU has: threads, and more than one microkernel for the same operands."""

import contextlib

import matrices
import pytest
import torch
import torch.utils.checkpoint

import spamm_torch


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def operands(dtype, m=500, k=700, n=300, make=matrices.patchy):
    return make(m, k, dtype=dtype), make(k, n, dtype=dtype, seed=1)


PLAIN_KERNELS = {
    torch.float16: "cpu-blas-float32",
    torch.bfloat16: "cpu-blas-float32",
    torch.float32: "cpu-blas",
    torch.float64: "cpu-plain",
}


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128), (32, 128, 64)])
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_with_and_without_onednn(dtype, block):
    """The generated microkernels and the plain ones agree bit for bit on exact sums."""
    a, b = operands(dtype)
    tau = 10.0
    expected = spamm_torch.mm(a, b, tau=tau, block=block)
    with torch.backends.mkldnn.flags(enabled=False):
        plain = spamm_torch.mm(a, b, tau=tau, block=block)
        name = spamm_torch.backend_for("cpu", dtype, block)
    assert torch.equal(plain, expected)
    assert name == PLAIN_KERNELS[dtype]


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("knob", [{"tau": 60.0}, {"valid_ratio": 0.3}, {"max_error": 0.1}])
def test_the_number_of_threads_changes_no_bit(dtype, knob):
    a, b = operands(dtype, make=matrices.normal)
    results = []
    for count in (1, 2, 3, 7):
        with threads(count):
            results.append(spamm_torch.mm(a, b, **knob))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_changes_no_stage(dtype):
    a, b = operands(dtype, make=matrices.normal)

    def stages():
        norm_a, norm_b = spamm_torch.norm_map(a, 32), spamm_torch.norm_map(b, 32)
        tau = spamm_torch.find_tau(norm_a, norm_b, 0.3)
        return (
            norm_a,
            norm_b,
            tau,
            torch.ops.spamm_torch.find_tau_for_error(norm_a, norm_b, 0.1),
            spamm_torch.valid_counts(norm_a, norm_b, tau),
            spamm_torch.error_bound(norm_a, norm_b, tau),
        )

    with threads(1):
        expected = stages()
    for count in (2, 3, 7):
        with threads(count):
            assert all(map(torch.equal, stages(), expected))


def test_gradients_from_a_backward_thread():
    """Products inside torch.utils.checkpoint run again in autograd's own thread."""
    a, b = operands(torch.float64, 60, 70, 50, matrices.normal)
    a.requires_grad_()
    again = torch.utils.checkpoint.checkpoint(
        lambda x: spamm_torch.mm(x, b, tau=30.0), a, use_reentrant=False
    )
    again.square().sum().backward()
    first, a.grad = a.grad, None
    spamm_torch.mm(a, b, tau=30.0).square().sum().backward()
    assert torch.equal(first, a.grad)
