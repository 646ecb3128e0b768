"""Convolution and linear layers that skip the block products that cannot matter.

Both modules are torch's own with a setting: exactly one of the knobs ``tau``, ``valid_ratio`` and
``max_error`` (see :mod:`spamm_torch.functional`), and the blocks it applies to. Parameters, their
initialisation and state dicts are those of torch's modules, so that weights move freely between the
dense and the approximate form. Training works: gradients are those of the dense layer.
"""

import torch
from torch import nn

from .functional import conv2d, linear, norm_map
from .settings import as_tau, check_block, check_knobs, check_pixel_block

_ops = torch.ops.spamm_torch

_NO_EDGES = (0, 0, 0)  # of a block left to the default, as the chain op takes it


# ---- What the modules share ---------------------------------------------------------------------


class _SpAMM:
    """The setting of a module, its pinned weight norms, and the way to its dense twin and back.

    Mixed in before a class of torch.nn. ``tau`` may be a 0-d tensor: it then moves with the module,
    stays out of the state dict, and is never read on the host.
    """

    _dense: type[nn.Module]  # the class of torch.nn

    def _set(self, *, tau, valid_ratio, max_error, **blocks):
        self.tau = tau
        self.valid_ratio = valid_ratio
        self.max_error = max_error
        for name, value in blocks.items():
            setattr(self, name, value)
        self._blocks = tuple(blocks)
        self._norm_weight = None
        self._tau_taken = (None, None)

    def _knobs(self):
        return {
            "tau": self.tau,
            "valid_ratio": self.valid_ratio,
            "max_error": self.max_error,
        }

    def _tau_argument(self):
        """The threshold in the op's form, made anew only when ``tau`` has been set to another."""
        if isinstance(self.tau, torch.Tensor):
            return self.tau
        tau, argument = self._tau_taken
        if tau is not self.tau:
            argument = as_tau(self.tau)
            self._tau_taken = (self.tau, argument)
        return argument

    @staticmethod
    def _arguments(module):
        """The constructor's arguments that make a module of the same shape."""
        raise NotImplementedError

    @classmethod
    def _from_dense(cls, module, **setting):
        _check_replaceable(module, cls)
        return _sharing(module, cls(**cls._arguments(module), device="meta", **setting))

    def to_dense(self):
        """torch's own module with the very same Parameters, in the same training mode."""
        return _sharing(self, self._dense(**self._arguments(self), device="meta"))

    def _weight_norms(self):
        raise NotImplementedError

    def freeze_(self):
        """Pins the weight's norms, for serving: they are no longer taken anew in each call.

        Moving, casting and loading the module pin them again. After any other change of the weight
        call ``freeze_()`` once more. Undone by ``train()`` and :meth:`unfreeze_`. Under autocast to
        another dtype the pinned norms rest, since the weight multiplied is not the one pinned.

        Returns the module.
        """
        with torch.no_grad():
            self._norm_weight = self._weight_norms()
        return self

    def unfreeze_(self):
        """Undoes :meth:`freeze_`. Returns the module."""
        self._norm_weight = None
        return self

    def _pinned_norms(self):
        """The pinned norms where they are those of the weight as it will be multiplied."""
        device, dtype = self.weight.device.type, self.weight.dtype
        if self._norm_weight is None or self.weight.is_meta:  # there is no autocast on meta
            return self._norm_weight
        is_cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype
        return None if is_cast else self._norm_weight

    def _pin_again(self):
        if self._norm_weight is not None:
            self.freeze_()

    def train(self, mode=True):
        if mode:
            self.unfreeze_()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if isinstance(self.tau, torch.Tensor):
            # On the CPU a threshold serves any device, and keeps the value that meta would lose.
            self.tau = self.tau.to("cpu" if self.weight.is_meta else self.weight.device)
        self._pin_again()
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._pin_again()

    def extra_repr(self):
        shown = {**self._knobs(), **{name: getattr(self, name) for name in self._blocks}}
        parts = [f"{name}={_shown(value)}" for name, value in shown.items() if value is not None]
        frozen = ["frozen"] if self._norm_weight is not None else []
        return ", ".join([super().extra_repr(), *parts, *frozen])


def _shown(value):
    is_scalar = isinstance(value, torch.Tensor)
    return f"{value.item():.6g}" if is_scalar else f"{value}"


def _check_replaceable(module, ours):
    """Only what computes as torch's own module, or is ours already, may be replaced by ours."""
    dense = ours._dense
    if not isinstance(module, dense):
        raise TypeError(f"from_dense expects a torch.nn.{dense.__name__}; got {type(module)}")
    methods = [name for name in ("forward", "_conv_forward") if hasattr(dense, name)]
    as_is = ours if isinstance(module, ours) else dense
    changed = [name for name in methods if getattr(type(module), name) is not getattr(as_is, name)]
    if changed:
        raise TypeError(
            f"from_dense expects a module that computes as torch.nn.{dense.__name__}; got "
            f"{type(module)}, which has its own {changed[0]}"
        )
    for name in ("weight", "bias"):
        tensor = getattr(module, name)
        is_plain = isinstance(tensor, nn.Parameter) and not nn.parameter.is_lazy(tensor)
        if not is_plain and not (name == "bias" and tensor is None):
            raise TypeError(
                f"from_dense expects an initialised Parameter as {name}; got {type(tensor)}"
            )


def _sharing(source, module):
    """Gives `module` the Parameters and the training mode of `source`."""
    module.weight = source.weight
    module.bias = source.bias
    module.training = source.training
    return module


# ---- The modules --------------------------------------------------------------------------------


class SpAMMConv2d(_SpAMM, nn.Conv2d):
    """``torch.nn.Conv2d`` that skips the block products that cannot matter.

    The convolution is weight matrix (out_channels x K) times im2col matrix (K x output pixels of
    all images); see :func:`spamm_torch.conv2d`, and there for ``block`` and ``pixel_block``.

    Which pixels share a block decides how well skipping preserves accuracy. By default a block
    holds images at one position of the picture: skipping then follows the position, which suits
    centred subjects. With a ``tau`` these are n images (64) whatever the batch, so that the same
    ``tau`` serves every batch size; a block that the batch does not fill is skipped as if it were
    full. With ``valid_ratio`` or ``max_error``, blocks of a smaller batch hold its images and some
    rows and columns. What is skipped for one image depends on the other images in its block. With
    ``pixel_block=(1, rows, columns)`` each image's result under a ``tau`` is bitwise independent of
    the others and of the batch size. A ``tau`` is tuned to one pixel_block: keep the two together.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype: as of ``torch.nn.Conv2d``.
        tau: threshold, a float or a 0-d tensor; block products whose norms multiply to less are
            skipped.
        valid_ratio: share of block products to keep, in (0, 1]; the threshold is searched for in
            each call.
        max_error: bound >= 0 of the error from skipping, relative to norm(weight matrix) *
            norm(im2col matrix); the threshold is searched for in each call.
        block: (m, k, n), an int for three equal ones, or None for the rule of
            :func:`spamm_torch.conv2d`.
        pixel_block: (images, rows, columns), powers of two whose product is the block's n, or None
            for the default.
        relu: rectify the result, in the same kernel where the device has one for it: for layers
            that a ReLU follows. The dense twin has no such option, so that ``to_dense`` refuses.

    Shape, memory format and dtype of input and output are those of ``torch.nn.Conv2d``.

    Raises ValueError for a knob, block or pixel_block out of range, and where not exactly one knob
    is given.
    """

    _dense = nn.Conv2d

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        padding_mode="zeros",
        device=None,
        dtype=None,
        *,
        tau=None,
        valid_ratio=None,
        max_error=None,
        block=None,
        pixel_block=None,
        relu=False,
    ):
        check_knobs(tau, valid_ratio, max_error)
        if block is not None:
            check_block(block)
        if pixel_block is not None:
            check_pixel_block(pixel_block, block)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self._set(
            tau=tau,
            valid_ratio=valid_ratio,
            max_error=max_error,
            block=block,
            pixel_block=pixel_block,
        )
        self.relu = relu

    @classmethod
    def from_dense(
        cls,
        module,
        *,
        tau=None,
        valid_ratio=None,
        max_error=None,
        block=None,
        pixel_block=None,
        relu=None,
    ):
        """A SpAMMConv2d that shares the very same Parameters with an ``nn.Conv2d``.

        ``relu=None`` keeps what the module does: False, but for a SpAMMConv2d its own. Training
        mode, device and dtype are the module's; its hooks are not copied. Raises TypeError for a
        module that computes differently from ``nn.Conv2d`` or whose weight is not a Parameter.
        """
        return cls._from_dense(
            module,
            tau=tau,
            valid_ratio=valid_ratio,
            max_error=max_error,
            block=block,
            pixel_block=pixel_block,
            relu=getattr(module, "relu", False) if relu is None else relu,
        )

    def to_dense(self):
        """torch's own module with the very same Parameters, in the same training mode.

        Raises ValueError where ``relu`` is set: ``nn.Conv2d`` cannot do the same.
        """
        if self.relu:
            raise ValueError(
                "to_dense expects relu=False, since nn.Conv2d does not rectify; got relu=True "
                "(clear it and put an nn.ReLU behind the module)"
            )
        return super().to_dense()

    def extra_repr(self):
        return super().extra_repr() + (", relu=True" if self.relu else "")

    @staticmethod
    def _arguments(module):
        return {
            "in_channels": module.in_channels,
            "out_channels": module.out_channels,
            "kernel_size": module.kernel_size,
            "stride": module.stride,
            "padding": module.padding,
            "dilation": module.dilation,
            "groups": module.groups,
            "bias": module.bias is not None,
            "padding_mode": module.padding_mode,
            "dtype": module.weight.dtype,
        }

    def _weight_norms(self):
        return _ops.conv2d_weight_norm(
            self.weight, self.groups, block=self.block, pixel_block=self.pixel_block
        )

    def _conv_forward(self, input, weight, bias):
        padding = self.padding
        if self.padding_mode != "zeros":
            input = nn.functional.pad(
                input, self._reversed_padding_repeated_twice, mode=self.padding_mode
            )
            padding = 0
        return conv2d(
            input,
            weight,
            bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            **self._knobs(),
            block=self.block,
            pixel_block=self.pixel_block,
            norm_weight=self._pinned_norms(),
            relu=self.relu,
        )

    def _in_chain(self):
        """The module as the chain op takes it: weight, bias, norms of the weight, knob, settings.

        Of what a call costs on the host, Python's checks are the larger half; here the module's
        settings have been checked when it was made, and the input by the layer before.
        """
        if self.tau is not None:
            kind, knob = 0, self._tau_argument()
        elif self.valid_ratio is not None:
            kind, knob = 1, as_tau(self.valid_ratio)
        else:
            kind, knob = 2, as_tau(self.max_error)
        block = _NO_EDGES if self.block is None else check_block(self.block)
        settings = (
            *(0, *self.stride, *self.padding, *self.dilation, self.groups, self.relu, kind),
            *(*block, *(self.pixel_block or _NO_EDGES)),
        )
        parameters = self._parameters  # torch's look-up by attribute takes longer
        return parameters["weight"], parameters["bias"], self._norm_weight, knob, settings


class SpAMMLinear(_SpAMM, nn.Linear):
    """``torch.nn.Linear`` that skips the block products that cannot matter.

    The product is rows of the input (A) times weight.T (B); see :func:`spamm_torch.linear`. Rows of
    one block are tested together: what is skipped for a row depends on its neighbours in the batch.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``.
        tau, valid_ratio, max_error: exactly one, as of :class:`SpAMMConv2d`.
        block: (m, k, n) for the rows, in_features and out_features, or an int for three equal ones.

    Raises ValueError for a knob or block out of range, and where not exactly one knob is given.
    """

    _dense = nn.Linear

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        tau=None,
        valid_ratio=None,
        max_error=None,
        block=64,
    ):
        check_knobs(tau, valid_ratio, max_error)
        check_block(block)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set(tau=tau, valid_ratio=valid_ratio, max_error=max_error, block=block)

    @classmethod
    def from_dense(cls, module, *, tau=None, valid_ratio=None, max_error=None, block=64):
        """A SpAMMLinear that shares the very same Parameters with an ``nn.Linear``.

        Training mode, device and dtype are the module's; its hooks are not copied. Raises
        TypeError for a module that computes differently from ``nn.Linear`` or whose weight is not a
        Parameter.
        """
        return cls._from_dense(
            module, tau=tau, valid_ratio=valid_ratio, max_error=max_error, block=block
        )

    @staticmethod
    def _arguments(module):
        return {
            "in_features": module.in_features,
            "out_features": module.out_features,
            "bias": module.bias is not None,
            "dtype": module.weight.dtype,
        }

    def _weight_norms(self):
        _, k, n = check_block(self.block)
        return norm_map(self.weight.t(), (k, n))

    def forward(self, input):
        return linear(
            input,
            self.weight,
            self.bias,
            **self._knobs(),
            block=self.block,
            norm_weight=self._pinned_norms(),
        )
