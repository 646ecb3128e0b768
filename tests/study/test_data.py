"""The study's data: reading, checking, splitting and placing MNIST."""

import gzip
import hashlib

import pytest
import torch
from study_tools import digits, idx_bytes, write_part
from support import raises_line

from models import data
from models.files import UserError
from models.training import validation_pictures


@pytest.fixture(autouse=True)
def no_root(monkeypatch):
    monkeypatch.delenv(data.ROOT_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def embedded():
    return data.load_digits()


def test_embedded_files_are_those_of_their_readme():
    readme = (data.EMBEDDED / "README.md").read_text()
    files = sorted(data.EMBEDDED.glob("*.gz"))
    assert len(files) == 2
    for path in files:
        assert f"`{path.name}` | `{hashlib.sha256(path.read_bytes()).hexdigest()}`" in readme


def test_embedded_is_mnists_test_set(embedded):
    assert embedded.images.shape == (10_000, 28, 28)
    assert embedded.images.dtype == embedded.labels.dtype == torch.uint8
    counts = torch.bincount(embedded.labels.long()).tolist()
    assert counts == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert embedded.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert "10,000 images" in embedded.description
    assert "embedded" in embedded.description


def test_split_is_a_partition_fixed_by_the_seed(embedded):
    numbered = data.Digits(torch.arange(10_000), embedded.labels, "numbered")
    training, validation = numbered.split(seed=3)
    assert (len(training), len(validation)) == (8_000, 2_000)
    assert torch.equal(
        torch.cat([training.images, validation.images]).sort().values, numbered.images
    )
    assert torch.equal(validation.labels, embedded.labels[validation.images])
    again, _ = numbered.split(seed=3)
    other, _ = numbered.split(seed=4)
    assert torch.equal(training.images, again.images)
    assert not torch.equal(training.images, other.images)


def test_pictures_are_centred_equal_channels():
    images, _ = digits(7)
    pictures = data.to_pictures(images)
    assert pictures.shape == (7, 3, 32, 32)
    assert pictures.dtype == torch.float32
    assert pictures.is_contiguous(memory_format=torch.channels_last)
    for channel in range(3):
        assert torch.equal((255 * pictures[:, channel, 2:30, 2:30]).round().byte(), images)
    frame = pictures.clone()
    frame[:, :, 2:30, 2:30] = 0
    assert not frame.any()


@pytest.mark.parametrize("shift", [(0, 0), (3, -1), (-6, 6), (6, 6)])
def test_shifts_move_an_image_and_lose_what_leaves(shift):
    images, _ = digits(2)
    shifts = torch.tensor([shift, (0, 0)])
    moved = data.to_pictures(images, shifts)
    centred = data.to_pictures(images)
    rolled = torch.nn.functional.pad(centred, (6, 6, 6, 6)).roll(shift, (2, 3))[:, :, 6:38, 6:38]
    assert torch.equal(moved[0], rolled[0])
    assert torch.equal(moved[1], centred[1])
    assert moved.is_contiguous(memory_format=torch.channels_last)


def test_drawn_shifts_stay_in_range_and_move_about_their_share():
    shifts = data.draw_shifts(4000, torch.Generator().manual_seed(0))
    assert shifts.unique().tolist() == list(range(-data.MAX_SHIFT, data.MAX_SHIFT + 1))
    half = data.draw_shifts(4000, torch.Generator().manual_seed(0), share=0.5)
    moved = half.any(1).double().mean()
    assert 0.45 < moved < 0.55


def test_validation_pictures_are_all_images_in_order():
    images, labels = digits(25)
    shifts = data.draw_shifts(25, torch.Generator().manual_seed(0))
    batches = list(validation_pictures(data.Digits(images, labels, ""), 10, shifts))
    assert [len(found) for _, found in batches] == [10, 10, 5]
    assert torch.equal(
        torch.cat([pictures for pictures, _ in batches]), data.to_pictures(images, shifts)
    )
    assert torch.equal(torch.cat([found for _, found in batches]), labels.long())


@pytest.mark.parametrize("packed", [True, False])
def test_reads_a_torchvision_root(tmp_path, packed, monkeypatch):
    images, labels = digits(20)
    write_part(tmp_path, "t10k", images, labels, packed)
    found = data.load_digits(tmp_path)
    assert torch.equal(found.images, images)
    assert torch.equal(found.labels, labels)
    assert str(tmp_path) in found.description
    monkeypatch.setenv(data.ROOT_VARIABLE, str(tmp_path))
    assert torch.equal(data.load_digits().images, images)


def test_full_is_both_parts_and_needs_no_network_where_files_are(tmp_path):
    for part, count in (("train", 30), ("t10k", 10)):
        write_part(tmp_path, part, *digits(count))
    found = data.load_digits(tmp_path, full=True)
    assert len(found) == 40
    assert "full" in found.description


def test_full_downloads_what_is_missing(tmp_path, monkeypatch):
    def download(root, download):
        assert download
        for part in ("train", "t10k"):
            write_part(root, part, *digits(10), packed=False)

    monkeypatch.setattr("torchvision.datasets.MNIST", download)
    assert len(data.load_digits(tmp_path, full=True)) == 20


def test_a_failed_download_says_what_is_missing(tmp_path, monkeypatch):
    def download(root, download):
        raise RuntimeError("Error downloading train-images:\nmirror 1\nmirror 2")

    monkeypatch.setattr("torchvision.datasets.MNIST", download)
    with raises_line(UserError, r"MNIST.raw.*Error downloading train-images"):
        data.load_digits(tmp_path, full=True)


def test_fingerprints_tell_data_apart():
    images, labels = digits(10)
    digest = data.Digits(images, labels, "a").fingerprint()
    assert digest == data.Digits(images.clone(), labels, "b").fingerprint()
    changed = images.clone()
    changed[3, 4, 5] += 1
    assert digest != data.Digits(changed, labels, "a").fingerprint()
    assert digest != data.Digits(images, labels.flip(0), "a").fingerprint()


# ---- Bad input ----------------------------------------------------------------------------------


def test_a_missing_file(tmp_path):
    raw = write_part(tmp_path, "t10k", *digits(10))
    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte.*found none"):
        data.load_digits(tmp_path)


IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def _damaged():
    """name -> (file, its damaged content unpacked or packed, expected words)."""
    images, labels = digits(10)
    content = idx_bytes(images)
    packed = gzip.compress(content)
    return {
        "truncated gzip": (IMAGES + ".gz", packed[:-100], "intact gzip"),
        "damaged gzip": (IMAGES + ".gz", packed[:30] + b"xxxxxxxx" + packed[38:], "intact gzip"),
        "no gzip": (IMAGES + ".gz", content, "intact gzip"),
        "empty gzip": (IMAGES + ".gz", b"", "got  in"),
        "wrong magic": (IMAGES, b"\x01" + content[1:], "magic 000008xx.*got 01000803"),
        "wrong type": (IMAGES, b"\0\0\x0d\x03" + content[4:], "got 00000d03"),
        "cut header": (IMAGES, content[:10], "header of 16 bytes; got 10"),
        "cut images": (IMAGES, content[:-1], "expected 7840 bytes.*got 7839"),
        "trailing bytes": (IMAGES, content + b"\0", "expected 7840 bytes.*got more"),
        "labels as images": (IMAGES, idx_bytes(labels), r"shape \(n, 28, 28\).*\(10,\)"),
        "small images": (IMAGES, idx_bytes(images[:, 1:]), r"\(10, 27, 28\)"),
        "fewer labels": (LABELS, idx_bytes(labels[1:]), r"each of the 10 images.*\(9,\)"),
        "label 10": (LABELS, idx_bytes(labels + 1), "0 to 9; got 10"),
    }


@pytest.mark.parametrize("damage", _damaged())
def test_a_damaged_file(tmp_path, damage):
    raw = write_part(tmp_path, "t10k", *digits(10))
    name, content, words = _damaged()[damage]
    (raw / name).write_bytes(content)
    with raises_line(UserError, words) as caught:
        data.load_digits(tmp_path)
    assert str(raw / name) in str(caught.value)
