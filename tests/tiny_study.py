"""What the tests of the study share: small data sets in MNIST's own file format, one thread."""

import gzip
import struct

import pytest
import torch

from common.console import exit_code


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Operators this small gain nothing from threads and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def silent(step, steps, message):
    """Progress that nobody sees."""


def same_parameters(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def run_script(main, capsys, *arguments):
    """Exit code, output and error lines of a script."""
    code = exit_code(lambda: main([str(argument) for argument in arguments]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def idx_bytes(tensor):
    """A uint8 tensor as the content of an IDX file."""
    header = struct.pack(f">BBBB{tensor.dim()}I", 0, 0, 8, tensor.dim(), *tensor.shape)
    return header + tensor.numpy().tobytes()


def digits(count, seed=0):
    """Images (count, 28, 28) and labels: a bar whose place tells the label, on noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count, dtype=torch.uint8) % 10
    images = torch.randint(0, 40, (count, 28, 28), dtype=torch.uint8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[6:22, 4 + 2 * label : 6 + 2 * label] = 255
    return images, labels


def write_part(root, part, images, labels, packed=True):
    """Writes one part ("train", "t10k") below ROOT/MNIST/raw, as torchvision lays it out."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for kind, tensor in {"images-idx3-ubyte": images, "labels-idx1-ubyte": labels}.items():
        content = idx_bytes(tensor)
        path = raw / f"{part}-{kind}"
        if packed:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
        else:
            path.write_bytes(content)
    return raw
