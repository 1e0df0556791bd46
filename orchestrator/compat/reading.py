"""Reads a project that uses another queue, and says of each use what becomes of it. Nothing is imported or run.

A use is a name that is imported from the library, a call of it or of a task, an option of such a call that is not the
same here, or a setting.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from orchestrator.compat.celery.conf import WITHOUT_EFFECT
from orchestrator.compat.coverage import LIBRARIES, MOVES, NO_EFFECT, PER_PROJECT, Library, Rule, Verdict, rule_of_name

_LARGEST = 2_000_000
"""Bytes of a file that is read; programs that people write are smaller."""
_SKIPPED = frozenset(["__pycache__", "site-packages", "dist-packages", "node_modules"])
_MARKS_OF_AN_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
_WAITING = frozenset(["timeout", "propagate", "interval", "follow_parents"])
"""Arguments of a method that waits for a result; others of its name, such as that of a dictionary, have more."""
_OPEN_ENDS = ("(", "[", "{", ",", "\\")


class Use(NamedTuple):
    """One use of a library."""

    file: str
    line: int
    library: str
    what: str
    verdict: Verdict
    note: str


@dataclass
class Findings:
    """What was found in a project."""

    files: int = 0
    """Python files that were read."""
    uses: list[Use] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    """Files that could not be read, and why."""
    diffs: list[str] = field(default_factory=list)
    """The change of each file, as a unified diff."""

    def count(self, verdict: Verdict) -> int:
        """Return how many uses have this verdict."""
        return sum(use.verdict is verdict for use in self.uses)

    @property
    def score(self) -> int | None:
        """The per cent of uses that move, rounded down, a file that was not read as one that does not; or None."""
        moving = len(self.uses) - self.count(Verdict.STAYS)
        return 100 * moving // (len(self.uses) + len(self.unread)) if self.uses else None


def read_project(path: Path) -> Findings:
    """Read a file, or all Python files of a folder."""
    findings, parsed = Findings(), []
    for file in _python_files(path):
        name = file.name if file == path else file.relative_to(path).as_posix()
        try:
            text, tree = _parse(file)
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
            findings.unread[name] = _reason(error)
            continue
        findings.files += 1
        parsed.append((name, text, tree))
    used = {name: library for *_, tree in parsed for name, library in _imported_libraries(tree).items()}
    for name, text, tree in parsed:
        try:
            reader = _Reader(name, tree, list(used.values()))
        except RecursionError as error:
            findings.unread[name] = _reason(error)
            continue
        findings.uses += reader.uses
        changed = difflib.unified_diff(_lines(text), _lines(_changed(text, reader)), f"a/{name}", f"b/{name}")
        findings.diffs.append("".join(changed))
    if (first := next((use for use in findings.uses if use.what == "Celery(…)"), None)) is not None:
        after = findings.uses.index(first) + 1
        findings.uses[after:after] = [first._replace(what=what, **rule._asdict()) for what, rule in PER_PROJECT.items()]
    return findings


def _python_files(path: Path) -> Iterator[Path]:
    """Yield the Python files of a project, each once: not those of environments, of packages, or behind links."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not _is_skipped(here / name))
        yield from (here / name for name in sorted(names) if name.endswith(".py") and not (here / name).is_symlink())


def _is_skipped(folder: Path) -> bool:
    return (
        folder.name in _SKIPPED
        or folder.name.startswith(".")
        or any((folder / mark).exists() for mark in _MARKS_OF_AN_ENVIRONMENT)
    )


def _parse(file: Path) -> tuple[str, ast.Module]:
    if (size := file.stat().st_size) > _LARGEST:
        raise ValueError(f"{size:,} bytes, and up to {_LARGEST:,} are read")
    data = file.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in texts, which are not ours to judge
        return data.decode(encoding), ast.parse(data)


def _reason(error: BaseException) -> str:
    where = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
    return f"{where}{getattr(error, 'msg', None) or str(error) or type(error).__name__}"


def _imported_libraries(tree: ast.Module) -> dict[str, Library]:
    tops = {module.partition(".")[0] for node in ast.walk(tree) for module in _modules_of(node)}
    return {LIBRARIES[top].name: LIBRARIES[top] for top in sorted(tops & LIBRARIES.keys())}


def _modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


class _Reader(ast.NodeVisitor):
    """Reads one file."""

    def __init__(self, file: str, tree: ast.Module, used: list[Library]) -> None:
        self._file = file
        self.uses: list[Use] = []
        self.imports: list[ast.Import | ast.ImportFrom] = []
        """Imports of a library."""
        self.settings: dict[int, str] = {}
        """By line, what to note at a setting that changes."""
        self._in_task = False
        self._modules: dict[str, str] = {}
        """Names that stand for a library here, and which."""
        self._used = used
        self._here = _imported_libraries(tree)
        self._configured = [library for library in used if library.settings]
        self._is_configuration = Path(file).stem in ("celeryconfig", "celery_config")
        self.visit(tree)
        self.uses.sort(key=lambda use: use.line)

    def _add(self, node: ast.AST, library: Library, what: str, rule: Rule) -> None:
        self.uses.append(Use(self._file, getattr(node, "lineno", 1), library.name, what, *rule))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if (library := LIBRARIES.get(alias.name.partition(".")[0])) is not None:
                rule = MOVES if alias.name in library.modules else library.otherwise
                self._add(node, library, f"import {alias.name}", rule)
                if alias.asname is None or "." not in alias.name:
                    self._modules[alias.asname or alias.name.partition(".")[0]] = alias.name.partition(".")[0]
                self.imports.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        library = None if node.level else LIBRARIES.get(module.partition(".")[0])
        if library is None:
            return
        for alias in node.names:
            rule = rule_of_name(module, alias.name) if alias.name != "*" else Rule(Verdict.CHANGES, "name what you use")
            self._add(alias, library, f"{module}.{alias.name}", rule)
        if module in library.modules:
            self.imports.append(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for library in self._used:
            if name in library.calls and (library.name in self._here or name in library.anywhere):
                self._add(node, library, f"{name}(…)", MOVES)
                for keyword in node.keywords:
                    if (rule := library.calls[name].get(keyword.arg or "")) is not None:
                        self._add(keyword, library, f"{name}({keyword.arg}=…)", rule)
        for library in self._here.values():
            for keyword in node.keywords:
                if (rule := library.attributes.get(what := f"{name}({keyword.arg}=…)")) is not None:
                    self._add(keyword, library, what, rule)
            waits = self._in_task and not node.args and _WAITING.issuperset(keyword.arg for keyword in node.keywords)
            if waits and (rule := library.attributes.get(what := f"{name}() in a task")) is not None:
                self._add(node, library, what, rule)
        if name == "update" and isinstance(node.func, ast.Attribute) and _is_conf(node.func.value):
            for library in self._configured:
                for keyword in node.keywords:
                    self._setting(keyword, library, keyword.arg or "")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for library in self._used:
            if library.name in self._here and (rule := library.attributes.get(node.attr)) is not None:
                self._add(node, library, f".{node.attr}", rule)
        module = self._modules.get(getattr(node.value, "id", ""))
        if module is not None:
            self._add(node, LIBRARIES[module], f"{module}.{node.attr}", rule_of_name(module, node.attr))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Count decorators without arguments, too."""
        around = self._in_task
        for decorator in node.decorator_list:
            function = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            for library in self._used:
                if name in library.calls and library.name in self._here:
                    self._in_task = True
                    if function is decorator:
                        self._add(decorator, library, f"@{name}", MOVES)
        self.generic_visit(node)
        self._in_task = around

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for library in self._configured:
                if isinstance(target, ast.Attribute) and _is_conf(target.value):
                    self._setting(node, library, target.attr)
                elif isinstance(target, ast.Name) and target.id.startswith(library.prefix):
                    self._setting(node, library, target.id.removeprefix(library.prefix).lower())
                elif isinstance(target, ast.Name) and self._is_configuration:
                    self._setting(node, library, target.id)
        self.generic_visit(node)

    def _setting(self, node: ast.Assign | ast.keyword, library: Library, name: str) -> None:
        rule = library.settings.get(name, NO_EFFECT if name in WITHOUT_EFFECT else MOVES)
        self._add(node, library, f"setting {name}", rule)
        if rule.note and node.end_lineno == node.lineno:
            self.settings[node.lineno] = rule.note


def _is_conf(node: ast.expr) -> bool:
    """Say whether this is the settings of an application: `app.conf`, or `conf` by itself."""
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "conf"


# -- changing imports and settings


def _changed(text: str, reader: _Reader) -> str:
    """Return the text of a file with its imports changed, and remarks at settings."""
    lines = _lines(text)
    for node in reader.imports:
        lines[node.lineno - 1] = _changed_import(lines[node.lineno - 1], node)
    for number, note in reader.settings.items():
        code, end = _split_end(lines[number - 1])
        if not code.rstrip().endswith(_OPEN_ENDS) and "#" not in code:
            lines[number - 1] = f"{code}  # {note}{end}"
    return "".join(lines)


def _lines(text: str) -> list[str]:
    """Return the lines of a program as Python counts them."""
    return list(io.StringIO(text, newline=""))


def _changed_import(line: str, node: ast.Import | ast.ImportFrom) -> str:
    indent, code = line[: node.col_offset], line[node.col_offset :]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return indent + code.replace(f"from {module} ", f"from {_counterpart(module)} ", 1)
    if len(node.names) > 1 or ";" in code:
        return line  # which somebody must take apart
    alias, (_, end) = node.names[0], _split_end(code)
    counterpart = _counterpart(alias.name)
    if alias.asname is not None or "." not in alias.name:
        return f"{indent}import {counterpart} as {alias.asname or alias.name}{end}"
    top = alias.name.partition(".")[0]
    return f"{indent}import {counterpart}{end}{indent}import {_counterpart(top)} as {top}{end}"


def _counterpart(module: str) -> str:
    return LIBRARIES[module.partition(".")[0]].modules.get(module, module)


def _split_end(line: str) -> tuple[str, str]:
    code = line.rstrip("\r\n")
    return code, line[len(code) :] or "\n"
