"""Which updates and signals a workflow's code handles, by its source, so that a misspelt one need not be sent."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable
from typing import Any

from orchestrator.domain.fleet.announced import unknown_signal
from orchestrator.errors import InvalidTask, UnknownHandler, did_you_mean
from orchestrator.sdk.tasks.signature import Signature

WORKFLOW_CLASS = "_workflow_class"
"""Where the function that runs a workflow class has that."""
SIGNAL_METHODS = "_signal_methods"
"""Where it has the names of the signals that the methods of the class take."""
_TAKES_SIGNALS = frozenset({"signal", "signals"})
"""Methods of a context by which code takes signals."""
_SEE_ALL = frozenset({"eval", "exec", "locals", "vars"})
"""Functions through which code may use its context without naming it."""


class WorkflowSignature(Signature):
    """A workflow's signature, and which updates and signals its code handles."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Collection[str],
        versions: Callable[[], Iterable[Callable[..., Any]]],
    ) -> None:
        """`versions` returns the functions that are registered under this name, of which any may run the code."""
        super().__init__(name, function, what="Workflow", leading=1, options=options)
        self._function = function
        self._versions = versions

    def classes(self) -> list[type]:
        """Return the classes that run the workflow, of all versions that are registered."""
        functions = (self._function, *self._versions())
        return list(dict.fromkeys(vars(one)[WORKFLOW_CLASS] for one in functions if WORKFLOW_CLASS in vars(one)))

    def check_update(self, name: str) -> None:
        """Refuse an update that no version of the code answers; where that is unknown, the run decides."""
        known = self._of_all_versions(update_names)
        if known is not None and name not in known:
            raise InvalidTask(
                f"Workflow {self.name!r} answers no update {name!r}.{did_you_mean(name, sorted(known))} "
                f"It answers: {', '.join(sorted(known)) or 'none'}."
            )

    def check_signal(self, name: str) -> None:
        """Refuse a signal that no version of the code takes; where that is unknown, it is sent."""
        known = self.signals()
        if known is not None and name not in known:
            raise UnknownHandler(unknown_signal(self.name, name, known))

    def signals(self) -> frozenset[str] | None:
        """Return the names of the signals that the code takes, of all versions; None if it may take any."""
        return self._of_all_versions(signal_names)

    def _of_all_versions(self, find: Callable[[Callable[..., Any]], frozenset[str] | None]) -> frozenset[str] | None:
        known: frozenset[str] = frozenset()
        for function in (self._function, *self._versions()):
            names = find(function)
            if names is None:
                return None
            known |= names
        return known


@functools.lru_cache(maxsize=1_000)
def signal_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the signals that a workflow takes: those of its methods, if it is a class.

    None for a function, and for a class that asks its context for signals, or hands it, or itself, to other code.
    """
    names: frozenset[str] | None = vars(function).get(SIGNAL_METHODS)
    return names if names is not None and _keeps_its_context(vars(function)[WORKFLOW_CLASS]) else None


def _keeps_its_context(kind: type) -> bool:
    try:
        own = [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in sys.stdlib_module_names]
        code = [node for one in own for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one))))]
    except Exception:  # noqa: BLE001  # there is no source, or none that can be read: a worker begins all the same
        return False
    context = next(iter(inspect.signature(kind).parameters))
    stored = [pair for node in code for pair in _assigned(node) if _is_name(pair[1], context)]
    kept = {context, *(to.attr for to, _ in stored if isinstance(to, ast.Attribute))}
    fine = {value for to, value in stored if isinstance(to, ast.Attribute)}
    fine |= {node.value for node in code if isinstance(node, ast.Attribute) and node.attr not in _TAKES_SIGNALS}
    return not any(
        _is_name(node, context, "self", *_SEE_ALL)
        or (isinstance(node, ast.Attribute) and node.attr in kept and isinstance(node.ctx, ast.Load))
        for node in code
        if node not in fine
    )


def _assigned(node: ast.AST) -> Iterable[tuple[ast.expr, ast.expr]]:
    """Yield what is assigned to what: `self.ctx, self.paid = ctx, 0` assigns twice."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names


@functools.lru_cache(maxsize=1_000)
def update_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names under which a function's code registers handlers of updates.

    None if its source is not at hand, it hands its context to other code, or it makes a name up as it runs.
    """
    code = _source(function)
    if code is None:
        return None
    reader = _Reader([*code.args.posonlyargs, *code.args.args][0].arg)
    for statement in code.body:
        reader.visit(statement)
    return frozenset(reader.names) if reader.is_certain else None


def _source(function: Callable[..., Any]) -> ast.AsyncFunctionDef | None:
    if hasattr(function, "__wrapped__"):
        return None
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return code if isinstance(code, ast.AsyncFunctionDef) and code.name == function.__name__ else None


class _Reader(ast.NodeVisitor):
    """Looks for `@ctx.update`, with or without brackets, and for any other use of the context that may be one."""

    def __init__(self, context: str) -> None:
        self._context = context
        self.names: set[str] = set()
        self.is_certain = True

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Read `@ctx.update` and `@ctx.update(validate=…)`, whose handlers have the names of their functions."""
        for decorator in [*node.decorator_list]:
            call = decorator if isinstance(decorator, ast.Call) and not decorator.args else None
            if self._is_update(decorator if call is None else call.func):
                self.names.add(node.name)
                node.decorator_list.remove(decorator)
                for keyword in () if call is None else call.keywords:
                    self.visit(keyword)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        """Read `ctx.update("name")`."""
        first = node.args[0] if node.args else None
        if self._is_update(node.func) and isinstance(first, ast.Constant) and isinstance(first.value, str):
            self.names.add(first.value)
            for keyword in node.keywords:
                self.visit(keyword)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Pass over what else is asked of the context."""
        if self._is_update(node):
            self.is_certain = False
        elif not self._is_context(node.value):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Notice a context that is handed on."""
        if self._is_context(node) or node.id in _SEE_ALL:
            self.is_certain = False

    def _is_update(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "update" and self._is_context(node.value)

    def _is_context(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self._context
