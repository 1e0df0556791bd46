"""Other processes: start, stop, and measure them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


class Failed(Exception):
    """A pass failed and cannot be counted."""


class Program:
    """A command with its child processes."""

    def __init__(self, name: str, command: Sequence[str | Path], folder: Path, environ: Mapping[str, str], piped: bool):
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}.log"
        pipe = subprocess.PIPE if piped else None
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environ,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only the harness, which then stops all programs in order
            )

    def output(self) -> str:
        """Return the end of the program's output."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def stop(self) -> None:
        """Terminate the program; kill it and its children if it does not end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def processes(self) -> dict[str, psutil.Process]:
        """Return the process and its children by name."""
        parent = psutil.Process(self.process.pid)
        children = parent.children(recursive=True)
        if not children:
            return {self.name: parent}
        numbered = {f"{self.name} process {number}": child for number, child in enumerate(children, 1)}
        return {f"{self.name} parent": parent, **numbered}


class Programs:
    """The programs of one round."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = environ
        self._running: list[Program] = []

    def start(self, name: str, command: Sequence[str | Path], *, piped: bool = False) -> Program:
        program = Program(name, command, self._folder, self._environ, piped)
        self._running.append(program)
        return program

    def stop(self, program: Program) -> None:
        self._running.remove(program)
        program.stop()

    def stop_all(self) -> None:
        while self._running:
            self._running.pop().stop()

    def expect_alive(self) -> None:
        """Raise `Failed` if a program has ended."""
        for program in self._running:
            if program.process.poll() is not None:
                raise Failed(f"The {program.name} ended with code {program.process.returncode}.")

    def output(self) -> str:
        """Return the last output of the running programs."""
        return "\n".join(f"--- {program.name}\n{program.output()}" for program in self._running)


@contextmanager
def running(folder: Path, environ: Mapping[str, str]) -> Iterator[Programs]:
    """Yield a `Programs`; stop all programs at the end of the block, and add their output to a failure."""
    folder.mkdir(parents=True)
    programs = Programs(folder, environ)
    try:
        yield programs
    except Failed as error:
        raise Failed(f"{error}\n{programs.output()}") from error
    finally:
        programs.stop_all()


def memory(*programs: Program) -> dict[str, float]:
    """Return the memory of each process in megabytes (10⁶ bytes), with its share of shared pages (PSS)."""
    return {
        name: process.memory_full_info().pss / 1e6
        for program in programs
        for name, process in program.processes().items()
    }


def cpu_seconds(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """Return the CPU time used by each process so far."""
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
