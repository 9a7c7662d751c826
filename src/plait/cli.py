"""The command `plait`."""

from __future__ import annotations

import math
import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from plait.errors import PlaitError

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
certs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keys and certificates of two parties.")
app.add_typer(certs, name="certs")
privacy = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What a private training tells of a row.")
app.add_typer(privacy, name="privacy")


@certs.command("init")
def certs_init(
    directory: Annotated[Path, typer.Argument(help="Where the files go; its README says which is whose.")],
    party: Annotated[list[str], typer.Option(help="A party; once for each.")] = ["leader", "follower"],  # noqa: B006 - typer reads it
    days: Annotated[int, typer.Option(help="For how long the parties' certificates are good.")] = 365,
    force: Annotated[bool, typer.Option(help="Replace files that are there.")] = False,
) -> None:
    """Make a certificate authority, and a key and certificate for each party."""
    from plait.federal.certificates import init  # noqa: PLC0415 - a command pays only for what it does

    for file in init(directory, party, days=days, force=force):
        print(file)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the curves, checkpoints and logs go.")] = Path("demo-output"),
) -> None:
    """Let two parties train one model on halves of handwritten digits, over mutual TLS: under a minute."""
    from plait.demo import run  # noqa: PLC0415 - a command pays only for what it does

    run(output)


@certs.command("renew")
def certs_renew(
    directory: Annotated[Path, typer.Argument(help="The directory of `plait certs init`, with ca.key in it.")],
    party: Annotated[str, typer.Option(help="Whose certificate.")],
    days: Annotated[int, typer.Option(help="For how long it is good.")] = 365,
) -> None:
    """Make a new key and certificate for one party; the others keep theirs."""
    from plait.federal.certificates import renew  # noqa: PLC0415

    for file in renew(directory, party, days=days):
        print(file)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def export(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="The directory of a run, one checkpoint in it, or TensorFlow's.")],
    script: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="What trained it; its own arguments follow.")
    ],
    format: Annotated[list[str] | None, typer.Option(help="torch, onnx or tf; once for each.")] = None,  # noqa: A002 - the option's name
    version: Annotated[str | None, typer.Option(help="A number or a name; otherwise the script's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the versions are; otherwise the script's place.")] = None,
) -> None:
    """Export what a script describes (mox.run, efl.export), with the variables of a checkpoint; nothing is trained."""
    from plait.export.script import Asked, export_script  # noqa: PLC0415

    request = Asked(
        checkpoint=checkpoint, formats=format or (), version=-1 if version == "-1" else version, directory=out
    )
    print(export_script(request, script, context.args))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def federate(
    leader: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The leader's script.")],
    follower: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The follower's script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The arguments of both scripts.")] = None,
    workers: Annotated[int, typer.Option(help="Processes of each party.")] = 1,
    certs: Annotated[Path | None, typer.Option(help="From `plait certs init`; otherwise throw-away ones.")] = None,
    insecure: Annotated[bool, typer.Option(help="Talk in plain text.")] = False,
    restarts: Annotated[int, typer.Option(help="How often a party that was killed is started again.")] = 3,
    log_dir: Annotated[Path | None, typer.Option(help="Where each party's output goes; plait-logs/TIME.")] = None,
) -> None:
    """Run both parties of a federation on this machine, over mutual TLS, with a view of both."""
    from plait.federal.run import federate as run_both  # noqa: PLC0415

    raise typer.Exit(
        run_both(
            leader,
            follower,
            args=arguments or [],
            workers=workers,
            certs=certs,
            insecure=insecure,
            restarts=restarts,
            log_dir=log_dir,
        )
    )


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, an export, a directory of them, safetensors, TFRecord.")],
    other: Annotated[Path | None, typer.Argument(help="Show how its tensors differ from those of PATH.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Mean, deviation, min, max, zeros, NaNs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List what is inside: tensors by name, stages done, positions in the data, features of records; never values."""
    from plait.inspection.looking import inspect as look  # noqa: PLC0415
    from plait.inspection.reports import show  # noqa: PLC0415

    show(look(path, other, stats=stats), as_json=as_json)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(help="script.py args..., or -m module args...")],
    workers: Annotated[int, typer.Option(help="Processes that train.")],
    servers: Annotated[int, typer.Option(help="Parameter servers; without any, the workers are one group.")] = 0,
    max_restarts: Annotated[int, typer.Option(help="How often a process, or the group, is started again.")] = 3,
    log_dir: Annotated[Path | None, typer.Option(help="Where each process's output goes; plait-logs/TIME.")] = None,
    port: Annotated[int | None, typer.Option(help="The first of the ports to use; otherwise free ones.")] = None,
) -> None:
    """Run a script as several processes on this machine; its exit code is that of the first that failed."""
    from plait.launch import run as run_cluster  # noqa: PLC0415

    raise typer.Exit(
        run_cluster(command, workers=workers, servers=servers, max_restarts=max_restarts, log_dir=log_dir, port=port)
    )


@app.command()
def nets(
    names: Annotated[list[str] | None, typer.Argument(help="Networks; all of them if none is named.")] = None,
    classes: Annotated[int | None, typer.Option(help="How many logits; otherwise as in the network's paper.")] = None,
) -> None:
    """Show the networks: size of their pictures, classes, parameters, multiply-adds of one picture."""
    from plait.nets import NETS, card, info  # noqa: PLC0415

    chosen = names or list(NETS)
    facts = [info(name) for name in chosen]
    print(f"{'network':<20} {'input':>11} {'classes':>7} {'parameters':>12} {'multiply-adds':>15}  preprocessing")
    for name, fact in zip(chosen, facts, strict=True):
        size = f"{fact.image_size}x{fact.image_size}x{fact.channels}"
        cost = card(name, classes)
        print(
            f"{name:<20} {size:>11} {classes or fact.classes:>7} {cost.parameters:>12,} {cost.multiply_adds:>15,}"
            f"  {fact.preprocessing}"
        )


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def party(
    command: Annotated[list[str], typer.Argument(help="script.py args..., or -m module args...")],
    role: Annotated[str, typer.Option(help="leader or follower.")],
    listen: Annotated[str | None, typer.Option(help="HOST:PORT where this party can be reached; or")] = None,
    peer: Annotated[str | None, typer.Option(help="HOST:PORT where the other one can.")] = None,
    certs: Annotated[Path | None, typer.Option(help="The directory with ca.pem, ROLE.pem and ROLE.key.")] = None,
    job: Annotated[str | None, typer.Option(help="The same name at both parties.")] = None,
    timeout: Annotated[float | None, typer.Option(help="For how many seconds a silent party is waited for.")] = None,
    insecure: Annotated[bool, typer.Option(help="Talk in plain text.")] = False,
    restarts: Annotated[int, typer.Option(help="How often the script is started again after a kill.")] = 3,
) -> None:
    """Run a script as one party of a federation; the other party runs its own elsewhere."""
    from plait.federal.run import party as run_party  # noqa: PLC0415

    raise typer.Exit(
        run_party(
            command,
            role=role,
            listen=listen,
            peer=peer,
            certs=certs,
            job=job,
            timeout=timeout,
            insecure=insecure,
            restarts=restarts,
        )
    )


@privacy.command("plan")
def privacy_plan(
    samples: Annotated[int, typer.Option(help="Rows of the training data.")],
    batch: Annotated[int, typer.Option(help="Rows in a step, of all workers together.")],
    epochs: Annotated[int, typer.Option(help="Passes over the data.")],
    epsilon: Annotated[float | None, typer.Option(help="What the model may tell in the end; or")] = None,
    noise: Annotated[float | None, typer.Option(help="the noise multiplier.")] = None,
    delta: Annotated[float, typer.Option(help="The probability with which the promise may fail.")] = 1e-5,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve into this PNG, too.")] = None,
) -> None:
    """Find the noise multiplier for an epsilon, or the epsilon of a noise multiplier, and show how it grows."""
    from plait.privacy.plan import draw, plan, text  # noqa: PLC0415

    found = plan(samples, batch, epochs, epsilon=epsilon, noise=noise, delta=delta)
    print(text(found))
    if plot is not None:
        if not draw(found, plot):
            raise typer.Exit(1)  # draw has said why
        print(f"drawn: {plot}")


@app.command()
def psi(
    ids: Annotated[Path, typer.Option(help="This party's table: CSV, TFRecord or Parquet.")],
    key: Annotated[list[str], typer.Option(help="The column that says whose row it is; once for each, if several.")],
    out: Annotated[Path, typer.Option(help="A directory for this party's rows that both have, and a manifest.")],
    role: Annotated[str, typer.Option(help="leader or follower.")],
    listen: Annotated[str | None, typer.Option(help="HOST:PORT where this party can be reached; or")] = None,
    peer: Annotated[str | None, typer.Option(help="HOST:PORT where the other one can.")] = None,
    certs: Annotated[Path | None, typer.Option(help="The directory with ca.pem, ROLE.pem and ROLE.key.")] = None,
    reveal: Annotated[str, typer.Option(help="Who learns which rows are common: both, leader, or sizes.")] = "both",
    duplicates: Annotated[str, typer.Option(help="Of rows with the same key: error, or take the first.")] = "error",
    ignore_case: Annotated[bool, typer.Option(help="Keys that differ in case alone are the same.")] = False,
    shards: Annotated[int, typer.Option(help="Files that the rows go into, one for each worker.")] = 1,
    job: Annotated[str | None, typer.Option(help="The same name at both parties.")] = None,
    timeout: Annotated[float | None, typer.Option(help="For how many seconds a silent party is waited for.")] = None,
    insecure: Annotated[bool, typer.Option(help="Talk in plain text.")] = False,
) -> None:
    """Find the rows that two parties both have, without showing each other the rest; started again, it goes on."""
    from plait.engine.report import show_log  # noqa: PLC0415
    from plait.psi.run import align, summary  # noqa: PLC0415

    show_log()
    found = align(
        ids,
        key,
        out,
        reveal=reveal,
        duplicates=duplicates,
        ignore_case=ignore_case,
        shards=shards,
        role=role,
        listen=listen,
        peer=peer,
        certs=None if certs is None else str(certs),
        job=job,
        timeout=timeout,
        insecure=insecure or None,
    )
    print(summary(found))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A Python script; what follows are its own arguments.")
    ],
    config: Annotated[Path | None, typer.Option(help="TOML or JSON for fit() and ctx.get().")] = None,
) -> None:
    """Run a script with a configuration file that its fit() calls read."""
    from plait.engine.settings import CONFIG_VARIABLE, read_config  # noqa: PLC0415

    if config is not None:
        read_config(config)  # a bad one is reported now, not in the middle
        os.environ[CONFIG_VARIABLE] = str(config)
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


@app.command()
def schedule(
    strategy: Annotated[str, typer.Argument(help="Stages, such as '5:0.1->0.4,10:0.4=>0.8,15:0.8,20:0.08'.")],
    samples: Annotated[int, typer.Option(help="Samples in an epoch.")] = 3200,
    batch_size: Annotated[int, typer.Option(help="Samples in a step, of all workers together.")] = 32,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this PNG.")] = None,
) -> None:
    """Show the learning rates of a piecewise schedule: first, middle and last of each stage."""
    from plait.optim.schedules import draw, piecewise_lr  # noqa: PLC0415

    found = piecewise_lr(strategy, samples, batch_size)
    print(f"{'epochs':>11} {'from step':>10} {'first':>10} {'middle':>10} {'last':>10}")
    for stage in found.stages:
        rates = (stage.first, stage.rate((stage.start + stage.end) / 2), stage.last)
        first_step = math.ceil(stage.start * samples / batch_size)
        print(f"{f'{stage.start:g}-{stage.end:g}':>11} {first_step:>10}" + "".join(f" {rate:>10.4g}" for rate in rates))
    print(f"{f'{stage.end:g}-':>11} {found.steps:>10} {stage.last:>10.4g}")
    if plot is not None:
        if not draw(found, found.steps, plot):
            raise typer.Exit(1)  # draw has said why
        print(f"drawn: {plot}")


@app.command()
def serve(
    directory: Annotated[Path, typer.Argument(help="A model's directory of versions, or one with several models.")],
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for a free one.")] = 8000,
    batch: Annotated[int, typer.Option(help="Rows that are computed together at most.")] = 16,
    batch_delay: Annotated[float, typer.Option(help="Milliseconds to wait for more of them.")] = 1.0,
    workers: Annotated[int, typer.Option(help="Batches that are computed at once.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of one computation; otherwise all cores.")] = None,
    queue: Annotated[int, typer.Option(help="Requests under way; one more is answered with 503.")] = 256,
    max_body: Annotated[int, typer.Option(help="Megabytes of a request; a larger one is answered with 413.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds to read a request, and to answer it.")] = 30.0,
    poll: Annotated[float, typer.Option(help="Seconds between two looks for new versions.")] = 2.0,
    format: Annotated[str | None, typer.Option(help="onnx or torch; otherwise onnx where there is one.")] = None,  # noqa: A002 - the option's name
    party: Annotated[str | None, typer.Option(help="leader or follower: the models are this party's parts.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT where the other party reaches this one; or")] = None,
    peer: Annotated[str | None, typer.Option(help="HOST:PORT where the other one can be reached.")] = None,
    certs: Annotated[Path | None, typer.Option(help="The directory with ca.pem, PARTY.pem and PARTY.key.")] = None,
    job: Annotated[str, typer.Option(help="The same name at both parties.")] = "plait",
    insecure: Annotated[bool, typer.Option(help="Talk with the other party in plain text.")] = False,
    rows: Annotated[Path | None, typer.Option(help="Answer the other party alone, from this safetensors file.")] = None,
) -> None:
    """Answer predictions of exported models over HTTP (Open Inference Protocol), with a page to try them."""
    from plait.serve.server import answer, party_of  # noqa: PLC0415
    from plait.serve.server import serve as run_server  # noqa: PLC0415
    from plait.serve.settings import Settings  # noqa: PLC0415

    settings = Settings(
        batch=batch,
        batch_delay=batch_delay / 1000,
        workers=workers,
        threads=threads,
        queue=queue,
        max_body=max_body * 2**20,
        timeout=timeout,
        poll=poll,
        format=format,
    )
    found = party_of(party, listen=listen, peer=peer, certs=certs, job=job, insecure=insecure, rows=rows)
    if found is not None and rows is not None:
        answer(directory, party=found, rows=rows, settings=settings)
    else:
        run_server(directory, host=host, port=port, settings=settings, party=found)


@app.command()
def version() -> None:
    """Print the version."""
    from plait.version import __version__  # noqa: PLC0415

    print(__version__)


def main() -> None:
    """Run the command; an error of plait's own is one message, not a traceback."""
    try:
        app()
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        sys.exit(1)
