"""`opd-trainer`: one program for every container of a job.

Each command imports what it needs when it runs: `drain` is a preStop hook and must start in a moment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opd_api.paths import CONFIG_FILE
from opd_api.vocabulary import ExitCode, Port


@dataclass(frozen=True, slots=True)
class Command:
    """One word of the command line."""

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default=CONFIG_FILE, help="trainer configuration (JSON)")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _config_argument(parser)
    parser.add_argument("--metrics-port", type=int, help="port of the metrics; default 9400 in a cluster, none locally")
    parser.add_argument(
        "--drain-port", type=int, help="port of the drain server; default 9401 in a cluster, none locally"
    )


def _run(args: argparse.Namespace) -> int:
    from opd_trainer.runner import run_command

    return run_command(args.config, metrics_port=args.metrics_port, drain_port=args.drain_port)


def _drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="wait until everything is saved")
    parser.add_argument("--host", help="address of the controller; default $FQ_RAY_IP or loopback")
    parser.add_argument("--port", type=int, default=Port.DRAIN, help="port of the controller")


def _drain(args: argparse.Namespace) -> int:
    from opd_trainer.drain import drain

    print(drain(host=args.host, port=args.port, wait=args.wait))
    return ExitCode.OK


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    from opd_trainer.teachers.server import add_server_arguments

    add_server_arguments(parser)


def _serve(args: argparse.Namespace) -> int:
    from opd_trainer.teachers.server import run_server

    return run_server(args)


def _preflight_arguments(parser: argparse.ArgumentParser) -> None:
    _config_argument(parser)
    parser.add_argument(
        "--termination-log", help="where the final document goes; default /dev/termination-log in a pod"
    )


def _check(args: argparse.Namespace) -> int:
    from opd_trainer.preflight.check import run_check

    return run_check(args.config, termination_log=args.termination_log)


def _probe(args: argparse.Namespace) -> int:
    from opd_trainer.preflight.probe import run_probe

    return run_probe(args.config, termination_log=args.termination_log)


def _local_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="OPDJob manifest")
    parser.add_argument("--data", default="opd-data", help="folder that stands for the claim (default ./opd-data)")
    parser.add_argument("--fresh", action="store_true", help="start anew instead of resuming")


def _local(args: argparse.Namespace) -> int:
    from opd_trainer.local import run_local

    return run_local(args.file, data=args.data, fresh=args.fresh)


COMMANDS = {
    "run": Command("train: the entrypoint of the RayJob", _run_arguments, _run),
    "check": Command(
        "look at models, data, tokenizers and storage; needs no accelerator", _preflight_arguments, _check
    ),
    "probe": Command("ask every teacher for real scores", _preflight_arguments, _probe),
    "serve": Command("serve a teacher with transformers", _serve_arguments, _serve),
    "drain": Command("ask the controller to save; the preStop hook", _drain_arguments, _drain),
    "local": Command("run an OPDJob as local processes (opd run)", _local_arguments, _local),
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: opd-trainer COMMAND [options]", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code (opd_api.vocabulary.ExitCode)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return ExitCode.OK if arguments else ExitCode.CONFIG
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"opd-trainer: there is no command {arguments[0]!r}\n\n{_usage()}", file=sys.stderr)
        return ExitCode.CONFIG
    parser = argparse.ArgumentParser(prog=f"opd-trainer {arguments[0]}", description=command.summary)
    command.arguments(parser)
    return command.run(parser.parse_args(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
