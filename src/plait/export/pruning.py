"""What no output needs is left out of a program: the loss, the labels, a discriminator."""

from __future__ import annotations

from typing import Any

import torch

from plait.export.program import Program

__all__ = ["prune"]


def prune(program: Program) -> None:
    """Remove operations without use, and then the variables and constants that nothing uses any more.

    What is left is smaller and quicker, and tells no more than it has to.
    """
    exported = program.exported
    live = _live(exported.graph)
    for node in reversed(exported.graph.nodes):
        if node.op == "call_function" and node not in live:
            exported.graph.erase_node(node)
    signature = exported.graph_signature
    unused = {node.name: node for node in exported.graph.nodes if node.op == "placeholder" and not node.users}
    kept = [one for one in signature.input_specs if one.target is None or one.arg.name not in unused]
    for one in signature.input_specs:
        if one not in kept:
            exported.graph.erase_node(unused[one.arg.name])
    signature.input_specs[:] = kept
    targets = {one.target for one in kept}
    for table in (exported.state_dict, exported.constants):
        for name in [name for name in table if name not in targets]:
            del table[name]
    exported.graph_module.recompile()


def _live(graph: Any) -> set[Any]:
    """The nodes that an output needs: what it is made of, and what is written into any of that."""
    writers = [node for node in graph.nodes if _written(node)]
    live: set[Any] = set()
    _add(live, [node for node in graph.nodes if node.op != "call_function" or node.is_impure()], set(writers))
    while True:
        memory = {_memory(node) for node in live}
        more = [node for node in writers if node not in live and memory & {_memory(one) for one in _written(node)}]
        if not more:
            return live
        _add(live, more, set())


def _add(live: set[Any], nodes: list[Any], without: set[Any]) -> None:
    waiting = [node for node in nodes if node not in without]
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting.extend(node.all_input_nodes)


def _written(node: Any) -> list[Any]:
    """The nodes whose memory an operation writes into."""
    return [one for one, info in _aliases(node) if info.is_write]


def _memory(node: Any) -> Any:
    """The node that the memory of this one was made by: views, and what was written into, have no memory of theirs."""
    while True:
        shared = [one for one, _ in _aliases(node)]
        if not shared:
            return node
        node = shared[0]


def _aliases(node: Any) -> list[tuple[Any, Any]]:
    """The arguments that share memory with the result, or are written into."""
    if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - it has no other name
        return []
    schema = node.target._schema  # noqa: SLF001 - same
    given = {**dict(zip((one.name for one in schema.arguments), node.args, strict=False)), **node.kwargs}
    found = [(given.get(one.name), one.alias_info) for one in schema.arguments if one.alias_info is not None]
    return [(value, info) for value, info in found if isinstance(value, torch.fx.Node)]
