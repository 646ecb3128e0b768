"""Converted networks in AOTInductor's packages, which Python and C++ load, and in safetensors."""

import copy
import subprocess
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_model, save_model

import spamm_torch

SERVE = Path(__file__).parents[2] / "build/example-cpp/serve"
PICTURES = {"resnet18": 64, "resnet50": 96}


@pytest.fixture(
    scope="module", params=["resnet18", pytest.param("resnet50", marks=pytest.mark.thorough)]
)
def packed(request, tmp_path_factory):
    """A converted network's pictures and result, and its package."""
    torch.manual_seed(0)
    network = getattr(torchvision.models, request.param)(weights=None).eval()
    pictures = torch.rand(2, 3, PICTURES[request.param], PICTURES[request.param])
    with torch.no_grad():
        before = network(pictures)
        spamm_torch.convert_(network, tau=0.0)
        expected = network(pictures)
        torch.testing.assert_close(expected, before, rtol=1e-3, atol=1e-4)
        program = torch.export.export(network, (pictures,))
    path = tmp_path_factory.mktemp("packed") / "network.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return pictures, expected, path


@pytest.mark.inductor
def test_python_runs_a_package(packed):
    pictures, expected, path = packed
    result = torch._inductor.aoti_load_package(str(path))(pictures)
    torch.testing.assert_close(result, expected)


def serve(*files):
    return subprocess.run([SERVE, *files], capture_output=True, text=True)


@pytest.mark.inductor
def test_cpp_runs_a_package(packed, tmp_path):
    """With the program of examples/cpp, which `make test` has built."""
    pictures, expected, path = packed
    torch.save(pictures, tmp_path / "pictures.pt")
    run = serve(path, tmp_path / "pictures.pt", tmp_path / "result.pt")
    assert run.returncode == 0, run.stderr
    torch.testing.assert_close(torch.load(tmp_path / "result.pt"), expected)


def test_the_program_says_what_it_cannot_read(tmp_path):
    run = serve("no.pt2", "no.pt", tmp_path / "no")
    assert run.returncode == 1
    assert "no.pt2" in run.stderr


def test_safetensors_both_ways(tmp_path):
    """Keys are those of the dense network: each loads the other's file."""
    torch.manual_seed(0)
    dense = torchvision.models.resnet18(weights=None).eval()
    converted = torchvision.models.resnet18(weights=None).eval()
    pictures = torch.rand(2, 3, 64, 64)
    spamm_torch.convert_(converted, tau=0.0)
    with torch.no_grad():
        save_model(dense, tmp_path / "dense.safetensors")
        load_model(converted, tmp_path / "dense.safetensors", strict=True)
        expected = dense(pictures)
        torch.testing.assert_close(converted(pictures), expected, rtol=1e-3, atol=1e-4)
        save_model(converted, tmp_path / "converted.safetensors")
        again = copy.deepcopy(dense)
        for parameter in again.parameters():
            parameter.zero_()
        load_model(again, tmp_path / "converted.safetensors", strict=True)
        assert torch.equal(again(pictures), expected)
