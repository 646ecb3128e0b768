#!/usr/bin/env python
"""A network of torchvision as it is, by torch.compile, and by the backend "spamm_torch".

    python examples/my_resnet.py                      # resnet18
    python examples/my_resnet.py resnet50 --batch 64

On a GPU in float16, launched by torch's CUDA graphs. Nothing is skipped. The table says what became
of each convolution.
"""

import argparse


def main(arguments=None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("network", nargs="?", default="resnet18")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--eager", action="store_true", help="without Inductor and its compiler")
    options = parser.parse_args(arguments)
    import torch  # not above: --help needs none of these
    import torchvision
    from torch.utils.benchmark import Timer

    import spamm_torch

    device, dtype = ("cuda", torch.half) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = torchvision.models.get_model(options.network)  # weights="DEFAULT" loads trained ones
    images = torch.rand(options.batch, 3, 224, 224).to(memory_format=torch.channels_last)
    model = model.eval().to(device, dtype, memory_format=torch.channels_last)
    images = images.to(device, dtype)
    how = {"mode": "reduce-overhead"} if device == "cuda" else {}  # else Python launches kernels
    calls = {"as it is": model, "torch.compile": torch.compile(model, **how)}
    if options.eager:
        del calls["torch.compile"]
        how = {"options": {"inner": "eager"}}
    calls["spamm_torch"] = torch.compile(model, backend="spamm_torch", **how)
    with torch.no_grad():
        expected = model(images)
        for name, call in calls.items():
            error = ((call(images) - expected).norm() / expected.norm()).item()
            time = Timer("call(images)", globals={"call": call, "images": images})
            median = time.blocked_autorange(min_run_time=2).median
            print(f"{name:15} {1e3 * median:8.2f} ms, {error:.0e} from the first")
    print(spamm_torch.explain(model))


if __name__ == "__main__":
    main()
