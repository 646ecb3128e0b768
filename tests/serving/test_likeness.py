"""Images in order of likeness: the order itself, models that take it, and batches of a data set."""

import copy
import pickle

import pytest
import torch
from support import Made, captured, refuses, waiting_is_an_error
from torch import nn
from torch.library import opcheck

from spamm_torch import OrderedBatch, SpAMMConv2d, likeness_order
from spamm_torch.likeness import order_and_places, order_images


def squares(count, size=16, edge=4, seed=0):
    """Pictures (count, 3, size, size) of a bright square somewhere."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.zeros(count, 3, size, size)
    corners = torch.randint(0, size - edge + 1, (count, 2), generator=generator)
    for picture, (top, left) in zip(pictures, corners.tolist(), strict=True):
        picture[:, top : top + edge, left : left + edge] = 1
    return pictures


def expected_order(images, block):
    """The order by its definition, one image at a time."""
    centres = []
    for pixels in images[:, 0].double():
        ink = pixels - pixels.min()
        height, width = ink.shape
        mass = ink.sum().item()
        row = sum(ink[y].sum().item() * (y + 0.5) for y in range(height))
        column = sum(ink[:, x].sum().item() * (x + 0.5) for x in range(width))
        has_centre = mass > 0 and mass < float("inf")
        centres.append((row / mass, column / mass) if has_centre else (height / 2, width / 2))
    count = len(centres)
    bands = max(1, round((count / block) ** 0.5))
    ranked = sorted(range(count), key=lambda i: round(centres[i][0], 9))
    order = []
    for band in range(bands):
        members = [i for place, i in enumerate(ranked) if place * bands // count == band]
        forth = -1 if band % 2 else 1
        order += sorted(members, key=lambda i: round(forth * centres[i][1], 9))
    return order


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        *(((200, 3, 9, 14), 32), ((640, 1, 8, 8), 64), ((100, 2, 5, 1), 4), ((63, 1, 6, 6), 64)),
        *(((1, 1, 1, 1), 64), ((0, 3, 8, 8), 64)),
    ],
)
def test_the_order_is_by_bands_of_centres_to_and_fro(shape, block, device):
    images = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device)
    order = likeness_order(images, block)
    assert (order.dtype, order.device) == (torch.int64, images.device)
    assert order.tolist() == expected_order(images.cpu(), block)
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(likeness_order(last, block), order)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *((kind, 1) for kind in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)),
        *((kind, 1) for kind in (torch.int64, torch.float16, torch.bfloat16, torch.float64)),
        *((torch.float32, scale) for scale in (1, 1e-38, 1e-30, 1e30, 3e38)),
    ],
)
def test_types_and_scales_give_the_order_of_the_same_pictures(dtype, scale, device):
    images = squares(200)
    found = likeness_order((scale * images).to(dtype).to(device), 16)
    assert torch.equal(found.cpu(), likeness_order(images, 16))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None])
def test_images_without_a_centre_count_as_centred(value, device):
    images = squares(100).to(device)
    images[::7] = 3.25
    if value is not None:
        images[::7, 0, 2, 3] = value
    centred = images.clone()
    centred[::7] = 0
    centred[::7, :, 7:9, 7:9] = 1
    assert torch.equal(likeness_order(images, 8), likeness_order(centred, 8))


def test_constant_images_are_centred_whatever_their_sums_round_to(device):
    images = torch.full((4, 1, 7, 9), 0.3, dtype=torch.float64, device=device)
    images[1:3] = 0
    images[1:3, :, 3] = 10
    images[1:3, :, 2] = 1  # a little above the middle
    assert likeness_order(images, 1).tolist() == [1, 2, 0, 3]  # two bands of rows
    assert likeness_order(images.mT, 64).tolist() == [1, 2, 0, 3]  # one band, by columns


def test_the_order_is_compiled_once_for_all_batches():
    compiled = torch.compile(likeness_order, fullgraph=True, dynamic=True, backend="eager")
    torch._dynamo.utils.counters.clear()
    for count in (640, 100, 333):
        images = squares(count)
        assert torch.equal(compiled(images), likeness_order(images))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("count", [0, 1, 33, 1024, 1025])
def test_places_undo_the_order(count, device):
    images = squares(count).to(device)
    order, places = order_and_places(images, 16)
    numbers = torch.arange(count, device=device)
    assert torch.equal(order[places], numbers)
    assert torch.equal(places[order], numbers)


def layouts(images):
    """The same images as they lie in memory, dense and otherwise, and an odd number of bytes."""
    last = images.contiguous(memory_format=torch.channels_last)
    apart = images.new_zeros(2 * len(images), *images.shape[1:])
    apart[::2] = images
    turned = images.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)  # images lie innermost
    return images, last, apart[::2], turned, images[:, :2, 1:], images[:, :1, :3, :5].contiguous()


@pytest.mark.parametrize("count", [0, 1, 40, 333, 1024, 1025])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
def test_images_are_copied_in_their_order(count, dtype, device):
    for images in layouts((100 * squares(count)).to(device, dtype)):
        for block in (8, 256):
            ordered, order, places = order_images(images, block)
            assert torch.equal(order, likeness_order(images, block))
            assert torch.equal(ordered, images[order])
            assert torch.equal(ordered[places], images)


def test_a_long_image_is_copied_as_a_whole(device):
    images = torch.rand(9, 5, 97, 83, generator=torch.Generator().manual_seed(2)).to(device)
    for x in (images, images.half().contiguous(memory_format=torch.channels_last)):
        ordered, order, _ = order_images(x, 1)
        assert torch.equal(ordered, x[order])
        assert ordered.stride() == x.stride()


@pytest.mark.cuda
@pytest.mark.parametrize("copies", [True, False])
def test_the_op_is_registered_as_torch_wants_it(copies):
    op, images = torch.ops.spamm_torch.order_images, squares(40).cuda()
    for layout in layouts(images):
        opcheck(op.default, (layout, 2, copies))
    for bad, bands, line in (
        (images[0], 2, "must be a batch"),
        (images.new_zeros(1025, 1, 2, 2), 2, "at most 1024"),
        (images, 0, "bands must be from 1"),
        (images + 0j, 1, "images must be of bool"),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=line):
            op(bad, bands, copies)


@pytest.mark.cuda
def test_gradients_pass_through_images_in_order():
    images = squares(40).cuda().requires_grad_()
    opcheck(torch.ops.spamm_torch.order_images.default, (images, 2))
    ordered, order, places = torch.ops.spamm_torch.order_images(images, 2)
    factor = torch.rand_like(ordered)
    (ordered * factor).sum().backward()
    assert torch.equal(images.grad, factor[places])
    assert not order.requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(images.detach(), factor)
        ordered, order, _ = torch.ops.spamm_torch.order_images(dual, 2)
        tangent = torch.autograd.forward_ad.unpack_dual(ordered).tangent
        assert torch.equal(tangent, factor[order])


@pytest.mark.cuda
def test_two_streams_order_at_the_same_time():
    batches = [squares(count, seed=count).cuda() for count in (128, 640)]
    expected = [order_images(images, 64) for images in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for images, stream, results in zip(batches, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(order_images(images, 64))
    torch.cuda.synchronize()
    for results, right in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for one in results for x, y in zip(one, right, strict=True))


@pytest.mark.cuda
def test_the_order_waits_for_nothing_and_can_be_captured():
    images = squares(640).cuda()
    likeness_order(images)
    with waiting_is_an_error():
        likeness_order(images)
    call = lambda: (likeness_order(images), order_images(images, 64)[0])  # noqa: E731
    graph, (order, ordered) = captured(call)
    for seed in (1, 2):
        images.copy_(squares(640, seed=seed))
        graph.replay()
        assert torch.equal(order, likeness_order(images))
        assert torch.equal(ordered, images[order])


@pytest.mark.parametrize(
    ("images", "block", "error", "message"),
    [
        ([1], 64, TypeError, "images must be a tensor; got list"),
        (torch.zeros(3, 8, 8), 64, RuntimeError, "got shape (3, 8, 8) (a batch of one is images["),
        (torch.zeros(2, 3), 64, RuntimeError, "shape (N, C, H, W) with C, H, W >= 1; got shape"),
        (torch.zeros(2, 3, 0, 4), 64, RuntimeError, "got shape (2, 3, 0, 4)"),
        (torch.zeros(2, 0, 4, 4), 64, RuntimeError, "got shape (2, 0, 4, 4)"),
        (torch.zeros(2, 3, 4, 4).cfloat(), 64, TypeError, "or float64; got complex64"),
        (
            torch.zeros(2, 3, 4, 4).to(torch.float8_e5m2),
            64,
            TypeError,
            "images must be bool, uint8",
        ),
        (torch.zeros(2, 3, 4, 4), 0, ValueError, "block must be 1 image or more; got 0"),
        (torch.zeros(2, 3, 4, 4), 2.5, TypeError, "block must be an integer"),
        (torch.zeros(2, 3, 4, 4), (64, 1, 1), TypeError, "got (64, 1, 1)"),
    ],
)
def test_bad_images_and_blocks(images, block, error, message):
    refuses(error, lambda: likeness_order(images, block), message)


# ---- OrderedBatch -------------------------------------------------------------------------------


class Seen(nn.Module):
    """Remembers what it was given; results as several kinds of containers."""

    def forward(self, images, labels=None, *, names=None):
        self.images, self.labels, self.names = images, labels, names
        flat = images.flatten(1)
        return {"flat": flat, "pair": (flat.sum(1), [images]), "none": None}


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))


def test_the_model_sees_the_batch_in_order_and_the_caller_does_not(device):
    images = squares(100).to(device).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(100, device=device)
    ordered = OrderedBatch(Seen(), block=8)
    found = ordered(images, labels, names=["a"])
    order, seen = likeness_order(images, 8), ordered.module
    assert torch.equal(seen.images, images[order])
    assert seen.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(seen.labels, labels[order])
    assert seen.names == ["a"]
    assert torch.equal(found["flat"], images.flatten(1))
    assert torch.equal(found["pair"][0], images.flatten(1).sum(1))
    assert torch.equal(found["pair"][1][0], images)
    assert found["none"] is None


def test_skipping_loses_less(device):
    conv = nn.Conv2d(3, 64, 3, padding=1)
    skips = SpAMMConv2d.from_dense(nn.Conv2d(64, 64, 3, padding=1), valid_ratio=0.3)
    model, dense = nn.Sequential(conv, skips), nn.Sequential(conv, skips.to_dense())
    nn.init.zeros_(conv.bias)
    model, images = model.to(device), squares(640).to(device)
    dense.to(device)
    with torch.no_grad():
        expected = dense(images)
        lost = (model(images) - expected).norm()
        assert (OrderedBatch(model)(images) - expected).norm() < 0.3 * lost


def test_the_state_dict_is_the_models_own():
    model = network()
    ordered = OrderedBatch(model)
    assert list(ordered.state_dict()) == list(model.state_dict())
    fresh = OrderedBatch(network())
    with torch.no_grad():
        model[0].weight.add_(1)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh.module[0].weight, model[0].weight)
    network().load_state_dict(fresh.state_dict(), strict=True)
    around, plain = nn.ModuleDict({"body": fresh}), nn.ModuleDict({"body": network()})
    assert list(around.state_dict()) == list(plain.state_dict())
    around.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(fresh.module[0].weight, plain["body"][0].weight)
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        fresh.load_state_dict({})
    with pytest.raises(RuntimeError, match="other"):
        fresh.load_state_dict(model.state_dict() | {"other": torch.zeros(1)})


def test_copies_pickles_compiled_and_exported_models_agree():
    ordered, images = OrderedBatch(network()).eval(), squares(100)
    with torch.no_grad():
        expected = ordered(images)
        assert torch.equal(copy.deepcopy(ordered)(images), expected)
        assert torch.equal(pickle.loads(pickle.dumps(ordered))(images), expected)
        compiled = torch.compile(ordered, fullgraph=True, backend="eager")
        assert torch.equal(compiled(images), expected)
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    exported = torch.export.export(ordered, (images,), dynamic_shapes=shapes).module()
    torch.testing.assert_close(exported(images[:70]), ordered(images[:70]))


def test_training_is_that_of_the_model():
    model, labels = network().double(), torch.arange(100) % 5
    other = OrderedBatch(copy.deepcopy(model))
    images, others = (squares(100).double().requires_grad_() for _ in range(2))
    for trained, given in ((model, images), (other, others)):
        nn.functional.cross_entropy(trained(given), labels).backward()
    torch.testing.assert_close(others.grad, images.grad)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad)


def called_with(result=torch.clone, size=(4, 1, 8, 8)):
    """A call of a model with this result."""
    return lambda: OrderedBatch(Made(lambda m, x: result(x)))(torch.zeros(size))


@pytest.mark.parametrize(
    ("call", "error", "fragments"),
    [
        (called_with(lambda x: x.sum()), ValueError,
         ["a result must have the batch of 4 as first dimension"]),
        (called_with(lambda x: (x, x[:2])), ValueError, ["got shape (2, 1, 8, 8)"]),
        (called_with(lambda x: {"a": "text"}), TypeError,
         ["tuples, lists and dicts of them; got a str"]),
        (called_with(lambda x: 1.0), TypeError, ["got a float"]),
        (lambda: OrderedBatch(1), TypeError, ["OrderedBatch expects an nn.Module; got int"]),
        (lambda: OrderedBatch(Seen(), block=-1), ValueError,
         ["block must be 1 image or more; got -1"]),
        (lambda: OrderedBatch(Seen())(torch.zeros(4, 1, 8, 8), torch.zeros(3)), ValueError,
         ["an argument must have the batch of 4 ", "(3,)"]),
        (called_with(size=(1, 8, 8)), RuntimeError,
         ["images must be a batch ", "got shape (1, 8, 8)"]),
    ],
)  # fmt: skip
def test_bad_results_and_arguments(call, error, fragments):
    refuses(error, call, *fragments)
