"""pytest in several processes that share one collection: `--processes N` forks after it.

Importing torch, transformers and ray costs ten seconds of processor time; workers of pytest-xdist pay it each, forks do not.
A module's tests stay together and in order, so that its fixtures are made once. A process takes the next module when it has
done one; a process that dies is a failure of the test it was running and of the rest of its modules.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

#: Indices of modules travel as four bytes, which a pipe hands to one reader whole.
WORD = 4
#: What a pipe takes before anybody reads.
PIPE_BYTES = 65536

#: Of a test's own time limit: so long a silence of all forks is taken before they are killed.
SILENCE = 2.0

Modules = Sequence[Sequence[pytest.Item]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--processes`."""
    parser.addoption("--processes", type=int, default=1, help="fork so many times after the collection")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Take the loop over when there is more than one process."""
    processes: int = session.config.getoption("--processes")
    # Errors of the collection, `--collect-only` and the one process are pytest's own business.
    if processes < 2 or session.testsfailed or session.config.option.collectonly or not session.items:
        return None
    _Run(session, processes).until_done()
    return True


def modules_of(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Items of one module together, the module with the most tests first: the last one to end should be a short one."""
    found = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    return sorted(found, key=len, reverse=True)


class _Run:
    """The parent: forks, and makes what the forks tell into reports of its own."""

    def __init__(self, session: pytest.Session, processes: int) -> None:
        self._config = session.config
        self._items = {item.nodeid: item for item in session.items}
        self._left = dict.fromkeys(self._items)
        limit = self._config.getoption("timeout", None) or self._config.getini("timeout")
        self._patience = SILENCE * float(limit) if limit else None
        self._running: dict[Connection, str | None] = {}
        self._pids: dict[Connection, int] = {}
        modules = modules_of(session.items)
        assert len(modules) * WORD <= PIPE_BYTES, "more modules than a pipe holds"
        queue, feed = os.pipe()
        os.write(feed, b"".join(index.to_bytes(WORD, "big") for index in range(len(modules))))
        os.close(feed)
        for _ in range(processes):
            self._fork(modules, queue)
        os.close(queue)

    def _fork(self, modules: Modules, queue: int) -> None:
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _work(self._config, modules, queue, theirs)
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                # Nothing of the parent's ends here: no summary, no report file, no atexit.
                os._exit(code)
        theirs.close()
        self._running[ours], self._pids[ours] = None, pid

    def until_done(self) -> None:
        """Every collected test has a report afterwards."""
        while self._running:
            ready = wait(list(self._running), self._patience)
            if not ready:
                # Deaf to pytest-timeout's signal: in C code that never returns, for example.
                for fork in self._running:
                    os.kill(self._pids[fork], signal.SIGKILL)
            for told in ready:
                assert isinstance(told, Connection)
                try:
                    self._take(told, *told.recv())
                except EOFError:
                    self._end(told)
        for nodeid in self._left:
            self._fail(nodeid, "the process that should have run this test died before")

    def _take(self, fork: Connection, kind: str, told: Any) -> None:
        hook = self._config.hook
        if kind == "starts":
            self._running[fork] = told
            self._left.pop(told)
            hook.pytest_runtest_logstart(nodeid=told, location=self._items[told].location)
        elif kind == "ends":
            self._running[fork] = None
            hook.pytest_runtest_logfinish(nodeid=told, location=self._items[told].location)
        else:
            report = hook.pytest_report_from_serializable(config=self._config, data=told)
            hook.pytest_runtest_logreport(report=report)

    def _end(self, fork: Connection) -> None:
        running = self._running.pop(fork)
        fork.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pids[fork], 0)[1])
        if running is not None:
            self._fail(running, f"the process that ran this test ended with {code}")

    def _fail(self, nodeid: str, why: str) -> None:
        location = self._items[nodeid].location
        report = pytest.TestReport(nodeid, location, keywords={}, outcome="failed", longrepr=why, when="call")
        self._config.hook.pytest_runtest_logreport(report=report)


def _work(config: pytest.Config, modules: Modules, queue: int, parent: Connection) -> None:
    """In the fork: run modules until none is left and tell the parent."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        # The parent's files of captured output have one offset for all of us.
        capture.stop_global_capturing()
        capture.start_global_capturing()
    indices = _indices(queue)
    index = next(indices, None)
    while index is not None:
        following = next(indices, None)
        module = modules[index]
        first_of_next = modules[following][0] if following is not None else None
        for item, after in zip(module, [*module[1:], first_of_next], strict=True):
            parent.send(("starts", item.nodeid))
            for report in runtestprotocol(item, log=False, nextitem=after):
                parent.send(("report", config.hook.pytest_report_to_serializable(config=config, report=report)))
            parent.send(("ends", item.nodeid))
        index = following


def _indices(queue: int) -> Iterator[int]:
    while word := os.read(queue, WORD):
        yield int.from_bytes(word, "big")
