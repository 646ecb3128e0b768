"""The backend "spamm_torch" of torch.compile, and its pass by itself, :func:`fuse`.

In a graph of inference every convolution gets its fastest engine, with what follows it in the same
call where that engine can, and the rest goes to Inductor. Weights are folded into tensors of their
own. Each call compares versions and addresses of what they were folded of, and folds them again,
in the same memory, where these differ. Everything else that may change is guarded by dynamo.
"""

import copy
import inspect
import itertools
import operator
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import Distribution
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _disable_current_modes

from .._arguments import check_block, check_bool, check_module
from .._library import VERSION
from .._output import Progress
from ..nn import _SpAMM
from .choice import (
    NORM_EDGE,
    Choice,
    call_of,
    choose,
    computes_output_norms,
    operands,
)
from .convert import device_name
from .fusion import (
    Constants,
    Functions,
    Site,
    arguments_of,
    attribute,
    erase_identities,
    find_sites,
    name_of,
    sizes_of,
    value_of,
    values_written,
    windows_of,
)
from .report import ConvertReport, Row, shape_text

_ops = torch.ops.spamm_torch

_INNER = ("inductor", "eager")
_version_of = operator.attrgetter("_version")

Compiled: TypeAlias = Callable[..., Any]
Model = TypeVar("Model", bound=nn.Module)


def backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """Compiles a graph of dynamo: ``torch.compile(model, backend="spamm_torch")``.

    Args:
        graph_module, example_inputs: as dynamo gives them.
        mode: as of ``torch.compile``, for Inductor.
        options: "inner": "inductor", or "eager" (nothing more is compiled), which computes the
            rest; "measure": True chooses engines by times, and is the default, False by a table;
            others are Inductor's.

    Raises ValueError for another "inner" and for others' options that nobody would read, and
    TypeError for a "measure" that is no bool.
    """
    rest = dict(options or {})
    inner, measures = rest.pop("inner", "inductor"), rest.pop("measure", True)
    compiles = _compiles(inner)
    check_bool(measures, "measure")
    if rest and not compiles:
        raise ValueError(
            f'with "inner": "eager" the only other option is "measure"; got {", ".join(rest)}'
        )
    modules = _guarded_modules()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, example_inputs, strict=True))
    given |= {node: _read(node) for node in graph_module.graph.find_nodes(op="get_attr")}  # frozen
    uncounted = _uncounted(graph_module.graph, given, modules)
    lasting = [node for node, value in given.items() if _is_lasting(node, value)]
    reason = _reason_to_leave(graph_module.graph, example_inputs, [given[node] for node in lasting])
    sources = [node for node in lasting if node not in uncounted]
    freezes = compiles and rest.get("freezing", torch._inductor.config.freezing)
    rewriting = _Rewriting(graph_module, sources, reason, freezes)
    rewriting.run(lambda node: given[node], measures, compiles, packs=True)
    inputs = {node: place for place, node in enumerate(placeholders)}
    places = [inputs.get(node) for node in rewriting.folding.sources]
    call = _Call(rewriting, places, [given[node] for node in lasting], modules)
    call.run = _inner(graph_module, example_inputs, compiles, mode, rest)
    return call


def fuse(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    inner: str = "inductor",
) -> fx.GraphModule:
    """The pass of the backend by itself, on any graph of inference.

    ``fuse(torch.export.export(model, images).module())`` can be exported again, for AOTInductor.

    Args:
        graph_module: what ``torch.fx.symbolic_trace``, onnx2torch, or ``module()`` of an exported
            program returns, in eval mode. It stays as it is.
        example_inputs: what it takes, by position. Then shapes are known, so that residual adds can
            be computed with a convolution, and engines are chosen by times. Graphs of
            ``torch.export`` know their shapes.
        inner: who computes the rest later: "inductor", or "eager" for nobody.

    Returns:
        Another GraphModule. It holds the weights folded as they are now, as buffers: changes of the
        first one do not act in it.

    Raises TypeError for what is no GraphModule, and ValueError for another ``inner``.

    Example:
        >>> fused = fuse(torch.fx.symbolic_trace(model), [images], inner="eager")
        >>> torch.allclose(fused(images), model(images), atol=1e-4)
        True
    """
    if not isinstance(graph_module, fx.GraphModule):
        kind = type(graph_module).__name__
        raise TypeError(
            f"fuse expects a torch.fx.GraphModule; got {kind} (torch.fx.symbolic_trace or "
            "torch.export make one)"
        )
    compiles = _compiles(inner)
    own = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    module = Functions(own).transform()
    with torch.no_grad():
        if example_inputs is not None:
            _Shapes(module).run(*example_inputs)
        attributes = module.graph.find_nodes(op="get_attr")
        sources = [node for node in attributes if type(_read(node)) in (Tensor, nn.Parameter)]
        rewriting = _Rewriting(module, sources)
        rewriting.run(_read, example_inputs is not None, compiles, packs=False)
    fused = fx.GraphModule(module, module.graph)
    fused.meta["spamm_torch"] = tuple(row for _, row in rewriting.rows)
    return fused


def explain(model: nn.Module) -> ConvertReport:
    """The engine of each convolution in what the backend compiled of a model, as a table.

    Args:
        model: a model that ``torch.compile(backend="spamm_torch")`` compiled and that was called
            since, or the result of :func:`fuse`.

    Returns:
        A report: a row for each convolution by the name of its weight, with what its call computes,
        the times of its candidates, and the reason of the choice, or why it was left.

    Raises:
        TypeError: a model that is no module.
        ValueError: a model of which the backend has compiled nothing yet.

    Example:
        >>> fast = torch.compile(model, backend="spamm_torch", options={"inner": "eager"})
        >>> with torch.no_grad():
        ...     result = fast(images)
        >>> [row.absorbed for row in explain(model)]
        [('relu',)]
    """
    check_module(model, "explain")
    rows: list[Row] = list(getattr(model, "meta", {}).get("spamm_torch", ()))
    calls = [] if rows else sorted(_calls_of(model), key=lambda call: call.number)
    if not rows and not calls:
        # model.compile() leaves torch's own forwards alone, Sequential's among them.
        is_torchs = type(model).forward.__module__.startswith("torch.nn.")
        hint = "; model.compile() compiles none of torch's own, torch.compile(model) does"
        raise ValueError(
            "explain expects a model that the backend spamm_torch compiled, called since; got "
            f"{type(model).__name__} of which nothing is compiled{hint if is_torchs else ''}"
        )
    names: defaultdict[int | None, list[str]] = defaultdict(list)  # of the layers of each weight
    for name, tensor in _tensors_of(model):
        names[id(tensor)].append(name.replace("_orig_mod.", "").removesuffix("weight").rstrip("."))
    newest: dict[Any, Row] = {}  # a graph that is compiled again has the rows of before
    for call in calls:
        seen: Counter[Any] = Counter()
        for weight, row in call.rows:
            if weight is not None and weight not in names:
                continue  # it left the model
            known = names.get(weight, [row.name])
            own = row if row.name in known else replace(row, name=known[0])
            seen[key := (weight, own.name)] += 1
            newest[key, seen[key]] = own
    return ConvertReport([*rows, *newest.values()], device=device_name(model))


def refresh_(model: Model) -> Model:
    """Brings what was made of a model's weights up to date: folded weights, and pinned norms.

    Changes act without it, in the next call. Call it after values were written where no counter
    tells: through ``.data`` at the same address, numpy or DLPack, by optimisers with
    ``fused=True``, by another process; and before captured CUDA graphs run again after any change.
    It writes into the memory that they read.

    Args:
        model: a model that the backend "spamm_torch" compiled, or with SpAMM layers, whose norms
            :meth:`SpAMMConv2d.freeze_` pinned.

    Returns:
        The model.

    Raises:
        TypeError: a model that is no module.
        ValueError: a model that is neither compiled nor has SpAMM layers.
    """
    check_module(model, "refresh_")
    calls = list(_calls_of(model))
    layers = [module for module in model.modules() if isinstance(module, _SpAMM)]
    if not calls and not layers:
        raise ValueError(
            "refresh_ expects a model that the backend spamm_torch compiled, or with SpAMM layers; "
            f"got {type(model).__name__} as it was"
        )
    for call in calls:
        call.fold_again()
    for layer in layers:
        layer._pin_again()
    return model


# ---- Registration -------------------------------------------------------------------------------

_NAME = "spamm_torch"


def register() -> None:
    """Makes the backend known to torch, also where the package is not installed; the compiler is
    not imported for it."""
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is None:
        sys.meta_path.append(_Source)
    elif _NAME not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=_NAME)


class _Source(Distribution):
    """A distribution beside the package's own, whose entry point is the backend, and the finder of
    it alone."""

    @classmethod
    def find_spec(cls, *_: Any) -> None:
        """Finds no module."""

    @classmethod
    def find_distributions(cls, context: Any = None) -> Iterator[Distribution]:
        """The distribution, unless another one is asked for."""
        if context is None or context.name in (None, __name__):
            yield cls()

    def read_text(self, filename: str) -> str | None:
        """The text of a file of metadata."""
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {__name__}\nVersion: {VERSION}\n",
            "entry_points.txt": f"[torch_dynamo_backends]\n{_NAME} = {__name__}:backend\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """The place of a file."""
        return path


# ---- Compiling ----------------------------------------------------------------------------------


def _compiles(inner: Any) -> bool:
    if inner not in _INNER:
        raise ValueError(f"inner must be one of {', '.join(_INNER)}; got {inner!r}")
    return bool(inner == "inductor")


def _inner(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    compiles: bool,
    mode: str | None,
    options: dict[str, Any],
) -> Compiled:
    """Compiles the graph as it is now."""
    if not compiles:
        return module.forward
    return torch._TorchCompileInductorWrapper(mode, options, None)(module, list(example_inputs))


def _guarded_modules() -> list[nn.Module]:
    """The modules that the graph in compilation calls. Lets dynamo guard on them having no hook,
    which it leaves out by default, and on the outermost ones being these: others of their classes
    are compiled apart, with weights of their own."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return []
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # a graph that no code of the user is translated for
        return []
    scope = {"L": output.local_scope, "G": output.global_scope}
    left_out = getattr(GuardBuilder, "EMPTY_NN_MODULE_HOOKS_DICT", None)
    found: dict[str, Any] = {}  # by name
    guards = context.guards_context.dynamo_guards
    for guard in list(guards):
        if guard.create_fn is not left_out:
            continue
        guard.create_fn = GuardBuilder.SEQUENCE_LENGTH
        source: Any = guard.originating_source
        outermost = None
        while (source := getattr(source, "base", None)) is not None:
            name = source.name
            if name not in found and name.startswith(("L[", "G[")):
                found[name] = eval(name, scope)
            if isinstance(found.get(name), nn.Module):
                outermost = source
        if outermost is not None:
            guards.add(outermost.make_guard(GuardBuilder.ID_MATCH))
    return [module for module in found.values() if isinstance(module, nn.Module)]


def _is_lasting(node: fx.Node, value: Any) -> bool:
    """Tells whether an input is a parameter or buffer, or an attribute of the graph, as parameters
    and buffers are with Inductor's freezing."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    known = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return node.op == "get_attr" or isinstance(value, nn.Parameter) or known is not None


def _uncounted(
    graph: fx.Graph, given: dict[fx.Node, Any], modules: Sequence[nn.Module]
) -> set[fx.Node]:
    """The statistics of batch norms whose updates nothing counts: a batch norm writes them without
    a new version, and only a module with ``num_batches_tracked`` counts its batches."""
    counted = {
        id(module._buffers.get(name))
        for module in modules
        if module._buffers.get("num_batches_tracked") is not None
        for name in ("running_mean", "running_var")
    }
    norms = (arguments_of(node) for node in graph.nodes if name_of(node) == "batch_norm")
    statistics = (norm.get(name) for norm in norms for name in ("running_mean", "running_var"))
    return {node for node in statistics if node in given and id(given[node]) not in counted}


def _reason_to_leave(graph: fx.Graph, inputs: Iterable[Any], lasting: Iterable[Tensor]) -> str:
    """Tells why nothing is fused in a graph of dynamo, or nothing. ``lasting``: its parameters and
    buffers."""
    if any(tensor.is_inference() for tensor in lasting):
        return "nothing counts changes of its weights: make it outside of torch.inference_mode()"
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    modes = {getattr(node.target, "__name__", "") for node in graph.nodes}
    if "_enter_autocast" in modes or any(
        torch.is_autocast_enabled(kind) for kind in {tensor.device.type for tensor in tensors}
    ):
        return "under autocast"
    wants = torch.is_grad_enabled() or "_set_grad_enabled" in modes
    if wants and any(tensor.requires_grad for tensor in tensors):
        return "gradients are wanted: call it under torch.no_grad()"
    return ""


class _Shapes(fx.Interpreter):
    """Runs a graph, and notes the form of each value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._mode = torch._subclasses.FakeTensorMode()

    def run_node(self, n: fx.Node) -> Any:
        """As of the base."""
        value = super().run_node(n)
        if type(value) in (Tensor, nn.Parameter) and n.op != "get_attr":
            n.meta["val"] = self._mode.from_tensor(value)
        return value


def _read(node: fx.Node) -> Any:
    return attribute(node.graph.owning_module, str(node.target))


# ---- Rewriting ----------------------------------------------------------------------------------


class _Folding:
    """Computes the operands of fused calls from ``sources``, copies of nodes in a graph apart."""

    def __init__(self) -> None:
        self.sources: list[fx.Node] = []
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._recipes: list[tuple[Any, ...]] = []

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            if node.op in ("placeholder", "get_attr"):
                self.sources.append(node)
                self._copies[node] = self._graph.placeholder(node.name)
            else:
                for read in node.all_input_nodes:
                    self._copy(read)
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        return self._copies[node]

    def add(self, engine: str, site: Site) -> None:
        """Adds the operands of a site, which are tensors or None."""
        read = fx.node.map_arg((site.weight, site.bias, site.scales, site.slope), self._copy)
        self._recipes.append((engine, site, read, sizes_of(value_of(site.input))))

    def operands(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor | None, ...]]:
        """The operands of each site for the values that the sources have now."""
        if not self._graph.find_nodes(op="output"):
            self._graph.output([read for _, _, read, _ in self._recipes])
        found: Any = fx.Interpreter(nn.Module(), graph=self._graph).run(*tensors)
        return [
            operands(engine, site, shape, *of_site)
            for (engine, site, _, shape), of_site in zip(self._recipes, found, strict=True)
        ]


class _Rewriting:
    """Puts one call in the place of each convolution and what it absorbs, in a graph.

    Attributes:
        rows: of the report, each behind the id of its weight, or None. folding: computes the
        operands of ``tensors``, its sources. buffers: what the graph reads of these, attributes of
        the module; ``kept`` tells which they are.

    Args:
        reason: why nothing is fused at all. freezes: Inductor makes constants of weights, and
            packs those of CPUs as well as it can be done.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        sources: Sequence[fx.Node],
        reason: str = "",
        freezes: bool = False,
    ) -> None:
        self.module, self.graph = module, module.graph
        if not reason:
            erase_identities(self.graph)
        self._constants, self._sources = Constants(self.graph, sources), set(sources)
        self._sites = find_sites(self.graph, self._constants)
        for site in self._sites:
            site.reason = site.reason or reason
            if freezes and not (site.reason or site.skips or value_of(site.weight).is_cuda):
                site.reason = "frozen: Inductor packs its weight"
        self.rows: list[tuple[int | None, Row]] = []
        self.folding = _Folding()
        self.buffers: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.kept: list[tuple[int, int]] = []
        self._now: dict[fx.Node, fx.Node] = {}  # nodes that took the place of others
        self._norms: dict[fx.Node, fx.Node] = {}  # of values, by the nodes that compute them

    def run(
        self, read: Callable[[fx.Node], Tensor], measures: bool, compiles: bool, packs: bool
    ) -> None:
        """Rewrites the graph. ``read``: the tensor of a source."""
        chosen: list[tuple[Site, Choice]] = []
        progress = Progress("spamm_torch", None if measures else False)
        for site in progress.over("measuring convolutions", self._sites):
            site.packs = packs
            choice = None if site.reason else choose(site, measures, compiles)
            weight = id(read(site.weight)) if site.weight in self._sources else None
            self.rows.append((weight, _row(site, choice)))
            if choice is not None:
                chosen.append((site, choice))
                self.folding.add(choice.engine, site)
        if not chosen:
            return
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            self.tensors = tensors = [read(node) for node in self.folding.sources]
            found = self.folding.operands(tensors)
        values = dict(zip(self.folding.sources, tensors, strict=True))
        memories = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        readers = self._norm_readers(chosen)
        absorbed = {site.pool for site, choice in chosen if choice.engine == "spamm, pool"}
        for node in list(self.graph.nodes):
            if name_of(node) == "max_pool2d" and node not in absorbed and not compiles:
                self._replace_pool(node)
        for place, ((site, choice), of_site) in enumerate(zip(chosen, found, strict=True)):
            nodes = []
            for which, (value, own) in enumerate(
                zip(of_site, (site.weight, site.bias, None, site.slope), strict=True)
            ):
                is_own = value is not None and value is values.get(own)
                if value is None or is_own:
                    nodes.append(own if is_own else None)
                    continue
                self.kept.append((place, which))
                is_shared = not value.is_mkldnn and value.untyped_storage().data_ptr() in memories
                self.buffers.append(value.clone() if is_shared else value)  # in memory of its own
                nodes.append(self._attribute(site.node))
            self._replace(site, choice.engine, nodes, readers)
        # Others than constants may have effects, which nothing tells.
        self.graph.eliminate_dead_code(
            lambda node: node.op in ("placeholder", "output") or node not in self._constants
        )
        self.module.recompile()

    def _attribute(self, before: fx.Node) -> fx.Node:
        """A node that reads the newest buffer."""
        name = f"spamm_torch_{len(self.buffers)}"
        self.module.register_buffer(name, self.buffers[-1])
        sources = getattr(self.module, "_param_name_to_source", None)
        if sources is not None:  # dynamo's, by which its compilers know lasting inputs
            sources[name] = torch._dynamo.source.ConstantSource(name)
        with self.graph.inserting_before(before):
            return self.graph.get_attr(name)

    def _norm_readers(self, chosen: Sequence[tuple[Site, Choice]]) -> set[Any]:
        """The convolutions, by their values, whose norms the site behind skips by."""
        engines = {site.last: choice.engine for site, choice in chosen}
        values = {site.input for site, _ in chosen if _reads_norms(site)}
        written = values_written(self.graph)
        return {x for x in values if engines.get(x) == "spamm" and x not in written}

    def _replace_pool(self, node: fx.Node) -> None:
        """Puts the op ``max_pool2d`` in a pool's place on CUDA, where it is faster than torch's."""
        given, windows = arguments_of(node), windows_of(node)
        images = value_of(given["input"])
        if windows is None or images is None or not images.is_cuda or images.dim() != 4:
            return
        args = (given["input"], *windows, bool(given.get("ceil_mode", False)))
        with self.graph.inserting_before(node):
            new = self.graph.call_function(_ops.max_pool2d.default, args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self._now[node] = new
        self.graph.erase_node(node)

    def _replace(self, site: Site, engine: str, given: Sequence[Any], readers: set[Any]) -> None:
        nodes = site.nodes[: site.folded] if engine == "torch" else site.nodes
        if engine == "spamm, pool" and site.pool is not None:
            nodes = [*nodes, site.pool]
        end, dtype = nodes[-1], value_of(site.weight).dtype
        x, residual = (self._now.get(node, node) for node in (site.input, site.residual))
        function, args, options = call_of(engine, site, dtype, (x, *given), residual)
        if x in self._norms and _reads_norms(site):
            options["norm_input"] = self._norms[x]
        with self.graph.inserting_before(end):
            if end in readers:
                both = self.graph.call_function(_ops.conv2d_with_norms.default, args, options)
                new = self.graph.call_function(operator.getitem, (both, 0))
                self._norms[new] = self.graph.call_function(operator.getitem, (both, 1))
            else:
                new = self.graph.call_function(function, args, options)
        new.meta = dict(end.meta)
        end.replace_all_uses_with(new)
        self._now[end] = new
        for node in reversed(nodes):
            self.graph.erase_node(node)


def _reads_norms(site: Site) -> bool:
    """Tells whether a site skips by the norms that the layer before it can compute."""
    images, setting = value_of(site.input), site.setting
    if not site.skips or images is None or site.geometry[3] != 1:
        return False
    block, pixel_block = setting.get("block"), setting.get("pixel_block")
    _, k, n = (0, NORM_EDGE, NORM_EDGE) if block is None else check_block(list(block))
    sizes = sizes_of(images)
    fills = setting.get("threshold") is not None or (sizes is not None and sizes[0] >= NORM_EDGE)
    is_whole = pixel_block is None or tuple(pixel_block) == (NORM_EDGE, 1, 1)
    reads = (k == NORM_EDGE or images.shape[1] <= k < NORM_EDGE) and n == NORM_EDGE and is_whole
    return fills and reads and computes_output_norms(images.device, images.dtype)


def _row(site: Site, choice: Choice | None) -> Row:
    weight = value_of(site.weight)
    shape = ""
    if weight is not None and site.geometry:
        stride, _, dilation, groups = site.geometry
        outer, inner, *kernel = weight.shape
        shape = shape_text(inner * groups, outer, kernel, stride, dilation, groups)
    row = Row(site.name, shape, "left", reason=site.reason)
    if choice is None:
        return row
    absorbed = site.absorbed
    if choice.engine == "torch":
        absorbed = tuple(what for what in absorbed if what in ("bn", "scale", "shift"))
    elif choice.engine == "spamm, pool":
        absorbed = (*absorbed, "pool")
    made: Any = {"absorbed": absorbed, "reason": choice.reason, "times": choice.times}
    return replace(row, action=choice.engine, **made)


# ---- Calls --------------------------------------------------------------------------------------

_calls: "weakref.WeakSet[_Call]" = weakref.WeakSet()
_numbers = itertools.count()


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    parameters = model.named_parameters(remove_duplicate=False)
    return itertools.chain(parameters, model.named_buffers(remove_duplicate=False))


def _calls_of(model: nn.Module) -> Iterator["_Call"]:
    """Finds what was compiled of a model: it reads a tensor of the model's."""
    own = {id(tensor) for _, tensor in _tensors_of(model)}
    for call in list(_calls):
        if any(id(tensor) in own for tensor in call.read):
            yield call


class _Call:
    """A compiled graph, which brings its folded weights up to date before it runs.

    Attributes:
        run: the graph. rows: of the report. read: the parameters and buffers that it reads.
        number: in the order of compiling.
    """

    run: Compiled

    def __init__(
        self,
        rewriting: _Rewriting,
        places: list[int | None],
        read: list[Tensor],
        modules: Iterable[nn.Module],
    ) -> None:
        self.rows, self.number, self.read = rewriting.rows, next(_numbers), read
        self._modules = [weakref.ref(module) for module in modules]
        self._norms = [weakref.ref(m) for m in modules if "num_batches_tracked" in m._buffers]
        self._methods = list(_methods_of({type(module) for module in modules}))
        self._kinds = [type(module) for module in modules]
        self._code = self._code_now()
        self._folding, self._kept = rewriting.folding, rewriting.kept
        self._buffers = rewriting.buffers
        self._places = places if rewriting.buffers else []
        self._lock = threading.Lock()
        self._note(rewriting.tensors)
        _calls.add(self)

    def __call__(self, *args: Any) -> Any:
        if self._code_now() != self._code:
            raise RuntimeError(
                "a compiled model expects modules of the classes and methods that they had, and as "
                "many hooks of all modules; got others (torch._dynamo.reset() compiles it anew)"
            )
        if self._places:
            pairs = zip(self._places, self._sources, strict=True)
            sources = [held if place is None else args[place] for place, held in pairs]
            if self._state_of(sources) != self._state:
                self._fold(sources)
        return self.run(*args)

    def _code_now(self) -> Any:
        """The classes of the modules, their methods and the hooks of all modules, of which dynamo
        guards only a part."""
        modules = [reference() for reference in self._modules]
        kinds = [
            kind if module is None else type(module)  # dynamo sees which module takes its place
            for module, kind in zip(modules, self._kinds, strict=True)
        ]
        hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        return kinds, [methods.get(name) for methods, name in self._methods], *map(len, hooks)

    def fold_again(self) -> None:
        """Folds the weights again, into the same memory. Those of another type, device or shape by
        now need none: dynamo compiles anew before they are used."""
        pairs = zip(self._sources, self._held, strict=True)
        is_as_before = all(
            (now.dtype, now.device, now.shape) == (held.dtype, held.device, held.shape)
            for now, held in pairs
        )
        if self._places and is_as_before:
            self._fold(self._sources)

    def _fold(self, sources: list[Tensor]) -> None:
        with self._lock, _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            found = self._folding.operands(sources)
            for buffer, (place, which) in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(found[place][which])
            self._note(sources)

    def _note(self, sources: Sequence[Tensor]) -> None:
        """Notes what the operands are folded of, and holds its memory, so that nothing else gets
        its address."""
        self._state = self._state_of(sources)
        self._sources = list(sources)
        self._held = [source.detach() for source in sources]

    def _state_of(self, tensors: Sequence[Tensor]) -> Any:
        """Everything that tells changes: versions, addresses, and of batch norms, which count no
        versions when they update their statistics, how many batches they have seen."""
        norms: list[Any] = [reference() for reference in self._norms]
        if None in norms:
            return object()  # another one takes its place, which is not known here
        counts = [norm._buffers.get("num_batches_tracked") for norm in norms]
        try:
            counted = (count for count in counts if count is not None)
            versions = list(map(_version_of, (*tensors, *counted)))
        except RuntimeError:  # a tensor of inference mode counts none
            return object()
        return versions, [tensor.data_ptr() for tensor in tensors], list(map(id, counts))


_METHODS = ("__call__", "forward", "_call_impl", "_conv_forward")


def _methods_of(kinds: Iterable[type]) -> Iterator[tuple[Any, str]]:
    """The methods that a call of such a module may run, as entries of its classes' namespaces:
    every one of a user's class, and of torch's those that take part in a call."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    for base in bases:
        if base in (nn.Module, object):
            continue
        own = () if base.__module__.startswith("torch.") else vars(base)
        found = {name for name in own if inspect.isfunction(vars(base)[name])}
        yield from ((vars(base), name) for name in sorted(found.union(_METHODS)))
