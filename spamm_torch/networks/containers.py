"""Generated code looks up each container of modules once a call, not on the way to every module.

Looking up a child of an nn.Module takes the host most of a microsecond, and a layer may lie four
containers deep: in a network of 150 layers that is as long as dozens of small kernels take.
"""

from __future__ import annotations

from torch import fx


def share_containers(graph: fx.Graph) -> None:
    """Rewrites calls of modules, and reads of attributes, of a graph that is to be printed."""
    shared = _Containers(graph)
    for node in list(graph.nodes):
        if node.op not in ("call_module", "get_attr"):
            continue
        with graph.inserting_before(node):
            value = shared.attribute(str(node.target))
            if node.op == "call_module":
                value = graph.call_method("__call__", (value, *node.args), dict(node.kwargs))
        node.replace_all_uses_with(value)
        graph.erase_node(node)


class _Containers:
    """The containers on the way to modules, each where it is first needed."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._found: dict[str, fx.Node] = {}

    def attribute(self, path: str) -> fx.Node:
        """The module or tensor at a path such as ``features.0.weight``."""
        container, _, name = path.rpartition(".")
        own = "at_" + path.replace(".", "_")  # no name of the code around it, such as self
        if not container:
            return self._graph.create_node("get_attr", name, name=own)
        arguments = (self._container(container), name)
        return self._graph.create_node("call_function", getattr, arguments, name=own)

    def _container(self, path: str) -> fx.Node:
        if path not in self._found:
            self._found[path] = self.attribute(path)
        return self._found[path]
