"""The ``drivetrain`` program. Every command imports what it needs when it is called."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from drivetrain import __version__
from drivetrain.background import leave
from drivetrain.errors import DrivetrainError

app = typer.Typer(
    name="drivetrain",
    help="Reinforcement-learning post-training of language models, from plugins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(help="YAML config.", show_default=False)]
Overrides = Annotated[Optional[list[str]], typer.Argument(help="section.key=value, over the file.", show_default=False)]
Run = Annotated[Path, typer.Argument(help="Run folder, or one of its checkpoints.", show_default=False)]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(value: bool) -> None:
    if value:
        print(f"drivetrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        Optional[str], typer.Option(help="Continue: 'auto' for the run folder's newest checkpoint, or a path.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Move an earlier run of that folder aside.")] = False,
) -> None:
    """Train a model as a config says."""
    from drivetrain.cli.train import train as run

    raise typer.Exit(run(config, overrides or [], resume=resume, overwrite=overwrite))


@app.command("eval")
def evaluate(run: Run, overrides: Overrides = None, as_json: AsJSON = False) -> None:
    """Answer a run's held-out prompts with its newest checkpoint."""
    from drivetrain.cli.use import evaluate as command

    command(run, overrides or [], as_json=as_json)


@app.command()
def generate(
    run: Run,
    overrides: Overrides = None,
    prompt: Annotated[Optional[list[str]], typer.Option(help="A prompt; may be given several times.")] = None,
    samples: Annotated[int, typer.Option(help="Completions of each prompt.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.", min=0)] = 0.0,
) -> None:
    """Let a run's newest checkpoint answer prompts."""
    from drivetrain.cli.use import generate as command

    command(run, overrides or [], prompts=prompt or [], samples=samples, temperature=temperature)


@app.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder."""
    from drivetrain.cli.use import export as command

    command(run, to, overrides or [])


@app.command()
def config(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved config and where each value came from."""
    from drivetrain.cli.show import show_config

    show_config(config, overrides or [])


@app.command()
def schema(
    out: Annotated[Optional[Path], typer.Option("--out", "-o", help="File to write instead of printing.")] = None,
) -> None:
    """Write a JSON schema of configs, with the installed plugins' sections, for editors."""
    from drivetrain.cli.show import show_schema

    show_schema(out)


@app.command()
def plugins(as_json: AsJSON = False) -> None:
    """List what is installed, and what is not loadable and why."""
    from drivetrain.cli.show import show_plugins

    show_plugins(as_json=as_json)


@app.command()
def doctor(as_json: AsJSON = False) -> None:
    """Check Python, torch, devices, engines and plugins."""
    from drivetrain.cli.doctor import doctor as command

    raise typer.Exit(command(as_json=as_json))


new = typer.Typer(help="Start a plugin of your own.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(new, name="new")


NewName = Annotated[str, typer.Argument(help="Its name in configs, such as my-own.", show_default=False)]
NewFolder = Annotated[Optional[Path], typer.Option(help="Where to put it; by default a folder of its name.")]


@new.command("algorithm")
def new_algorithm(name: NewName, folder: NewFolder = None) -> None:
    """Write an algorithm as a distribution of its own, ready for pip install."""
    from drivetrain.cli.new import new as command

    command("algorithm", name, folder)


@new.command("advantage")
def new_advantage(name: NewName, folder: NewFolder = None) -> None:
    """Write an advantage estimator as a distribution of its own, for algorithm.advantage."""
    from drivetrain.cli.new import new as command

    command("advantage", name, folder)


@new.command("loss")
def new_loss(name: NewName, folder: NewFolder = None) -> None:
    """Write a policy loss as a distribution of its own, for algorithm.policy_loss."""
    from drivetrain.cli.new import new as command

    command("loss", name, folder)


def _add_plugin_commands() -> None:
    """Commands of plugins; one that fails to import is left to say so when it is called."""
    from drivetrain.seam.registry import get_registry

    registry = get_registry()
    own = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for spec in registry.specs("commands"):
        if spec.name not in own:
            app.command(spec.name, help=spec.summary, context_settings={"ignore_unknown_options": True},
                        add_help_option=False)(_deferred(spec.name))  # fmt: skip


def _deferred(name: str) -> Any:
    """A command that imports its plugin's function only when it is called."""

    def command(arguments: Annotated[Optional[list[str]], typer.Argument()] = None) -> None:
        from drivetrain.seam.registry import resolve

        factory = resolve("commands", name)
        inner = factory
        if not isinstance(factory, typer.Typer):
            inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            inner.command()(factory)
        code = inner(arguments or [], prog_name=f"drivetrain {name}", standalone_mode=False)
        raise typer.Exit(code if isinstance(code, int) else 0)

    return command


def main() -> None:
    """Run the program. Exit codes: 0 done, 1 a failure, 2 the user's mistake, 130 stopped by the user."""
    leave(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the program with arguments, and return its exit code."""
    with_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        _add_plugin_commands()
        code = app(arguments, prog_name="drivetrain", standalone_mode=False)
        return int(code or 0)
    except DrivetrainError as error:
        _show(error, f"error: {error}", with_traceback)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, typer.Abort):
            if not isinstance(error.__cause__, EOFError):
                print("stopped", file=sys.stderr)
                return 130
            error = error.__cause__  # typer takes the end of any file for the user's wish to stop
        if hasattr(error, "show"):  # the command line was wrong; the message names the option
            error.show()
            return 2
        text = f"error: {type(error).__name__}: {error}\n  this was not foreseen; --traceback shows where it happened"
        _show(error, text, with_traceback)
        return 1


def _show(error: Exception, text: str, with_traceback: bool) -> None:
    """Print the message, or the traceback, which ends with it."""
    print("".join(traceback.format_exception(error)) if with_traceback else text, file=sys.stderr)
