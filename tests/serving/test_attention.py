"""SpAMMLinear inside torch's attention layers: called where it can be, named where it cannot."""

import copy
import pickle

import pytest
import torch
from torch import nn

from spamm_torch import SpAMMLinear

ALL_SKIPPED = 1e9  # a tau that leaves the bias alone


def with_spamm(layer, tau=ALL_SKIPPED):
    """The layer with its feed-forward part made approximate."""
    layer.linear1 = SpAMMLinear.from_dense(layer.linear1, tau=tau)
    layer.linear2 = SpAMMLinear.from_dense(layer.linear2, tau=tau)
    return layer


def pickled_and_back(module):
    return pickle.loads(pickle.dumps(module))


def encoder_layer(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **options).eval()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled_and_back])
def test_an_encoder_layer_calls_its_linear_layers(norm_first, duplicate):
    dense = encoder_layer(norm_first=norm_first)
    layer = duplicate(with_spamm(copy.deepcopy(dense)))
    input = torch.randn(2, 5, 64)
    skipping = copy.deepcopy(dense)
    nn.init.zeros_(skipping.linear1.weight)
    nn.init.zeros_(skipping.linear2.weight)
    with torch.no_grad():
        output = layer(input)
        torch.testing.assert_close(output, skipping(input))
        assert not torch.allclose(output, dense(input))
    torch.testing.assert_close(layer(input), output)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_an_encoder_that_makes_nested_tensors():
    """With a padding mask, in evaluation, nn.TransformerEncoder drops the padding."""
    encoder = nn.TransformerEncoder(encoder_layer(), 2).eval()
    approximate = copy.deepcopy(encoder)
    for layer in approximate.layers:
        with_spamm(layer, tau=0.0)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    input = torch.randn(3, 5, 64)
    with torch.no_grad():
        expected = encoder(input, src_key_padding_mask=padding)
        output = approximate(input, src_key_padding_mask=padding)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_input_is_its_sequences(layout):
    module = SpAMMLinear(64, 32, tau=0.0)
    sequences = [torch.randn(length, 64) for length in (3, 1, 6)]
    nested = module(torch.nested.as_nested_tensor(sequences, layout=layout))
    assert nested.layout == layout
    for output, sequence in zip(nested.unbind(), sequences, strict=True):
        torch.testing.assert_close(output, module(sequence))


def test_compiles_in_an_encoder_layer():
    layer = with_spamm(encoder_layer())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    input = torch.randn(2, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(input), layer(input))


def test_an_output_projection_is_never_called():
    layer = encoder_layer()
    attention = layer.self_attn
    attention.out_proj = SpAMMLinear.from_dense(attention.out_proj, tau=ALL_SKIPPED).eval()
    attention.out_proj.forward = lambda input: pytest.fail("it is called")
    input = torch.randn(2, 5, 64)
    attention(input, input, input)
    with torch.no_grad():
        attention(input, input, input)
