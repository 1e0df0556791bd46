"""What a mutation is, and what finds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Finder(NamedTuple):
    """A command of which it is known that a mutation makes it fail."""

    arguments: tuple[str, ...]
    """Of Python, in a repository."""
    says: str
    """A regular expression for what it prints then: a mutation that breaks something else has not been found."""
    tries: int = 1
    """How often it is run. What real faults meet is a matter of time."""

    @property
    def command(self) -> str:
        """Return the command as somebody would type it who has made the change by hand."""
        module, *rest = self.arguments[1:]
        script = {"tests.chaos.real": "scripts/chaos", "pytest": "scripts/test"}.get(module, f"python -m {module}")
        return " ".join([script, *(word for word in rest if word not in QUIET)])


QUIET = ("-q", "--no-header", "-p", "no:cacheprovider", "-x")


def seeds(numbers: str, says: str) -> Finder:
    """A seed of the simulator, such as `85`, or several."""
    return Finder(("-m", "tests.chaos.simulator", *numbers.split()), says)


def chaos(options: str, says: str, *, tries: int = 2) -> Finder:
    """A run of the driver that breaks real processes."""
    return Finder(("-m", "tests.chaos.real", *options.split()), says, tries)


def tests(names: str, says: str) -> Finder:
    """Tests, by file or as `file::test`."""
    return Finder(("-m", "pytest", *QUIET, *names.split()), says)


class NotThere(Exception):
    """The product is not written any more as a mutation expects it."""


@dataclass(frozen=True)
class Mutation:
    """One change that breaks a promise."""

    name: str
    what: str
    """What the product does then, for people."""
    file: str
    old: str
    """Stands in the file once."""
    new: str
    finders: tuple[Finder, ...]
    """Each of them finds it on its own."""
    missed: str = ""
    """Who does not find it, and why."""

    def mutated(self, repository: Path) -> str:
        """Return the text of the file with the change in it."""
        path = repository / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (found := text.count(self.old)) != 1:
            raise NotThere(
                f"Mutation {self.name}: expected its old text once in {self.file}, found it {found} times. Find out "
                f"what stands there now, and give the mutation the text that breaks the same promise:\n{self.old}"
            )
        return text.replace(self.old, self.new)
