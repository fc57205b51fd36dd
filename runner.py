"""opshim's commands. Each is a few lines that call one function of a module; nothing heavy is imported before."""

from __future__ import annotations

import signal
import sys

NO_MODULE = "opshim: no module {}: use .venv/bin/python, or make env"
try:
    import click
except ModuleNotFoundError:
    print(NO_MODULE.format("click"), file=sys.stderr)
    sys.exit(2)

# No "-h": click would find it in vLLM's -dph, which it reads letter by letter.
PASS_ON = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
FILES = click.option(
    "--provider-file", "provider_files", multiple=True, metavar="FILE", help="A file that registers implementations."
)
CHOICES = click.option(
    "--provider", "providers", multiple=True, metavar="OP=PROVIDER", help="Choose the provider of one op (repeatable)."
)
OPS = click.option("--op", "ops", multiple=True, metavar="OP", help="Only this op (repeatable; default: all).")
POLICY = click.option("--policy", metavar="[strict|auto|reference]", help="Who may serve; see README.")
DEVICE = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
JSON = click.option("--json", "json_out", metavar="OUT", help="Write the results here (bench: a plot beside it).")


def only(context, option, given):
    """The one value of an option that click would take the last of, where two are given."""
    if len(given) > 1:
        raise click.BadParameter(f"one at a time, got {' and '.join(given)}")
    return given[0]


class Command(click.Command):
    """One whose first sentence stands in the list of commands uncut, and that begins with a look at opshim's variables."""

    def get_short_help_str(self, limit=45):
        return super().get_short_help_str(200)

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, ["--help" if one == "-h" else one for one in args])

    def invoke(self, ctx):
        from shim import variables

        variables.check()
        for name in variables.drop_internal():
            click.echo(f"opshim: {name} is set by serve only; not read", err=True)
        for name, meant in () if self.name == "serve" else variables.unknown():  # serve has a row for it
            click.echo(f"opshim: {name} is no variable of opshim{f', is {meant} meant?' if meant else ''}", err=True)
        return super().invoke(ctx)


class Commands(click.Group):
    """Errors that opshim raises on purpose, and a lack of torch, end a command with one line and exit code 2, and
    signals with one line and 128 plus their number."""

    command_class = Command

    def resolve_command(self, ctx, args):
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            error.message += f" There are {', '.join(self.list_commands(ctx))}."
            raise

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except click.ClickException:
            raise
        except KeyboardInterrupt as stop:
            number = getattr(stop, "signal", signal.SIGINT)
            click.echo(f"opshim: stopped by {number.name}", err=True)
            sys.exit(128 + number)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                click.echo(NO_MODULE.format("torch"), err=True)
                sys.exit(2)
            if "shim.errors" in sys.modules and isinstance(error, sys.modules["shim.errors"].OpshimError):
                click.echo(f"opshim: {error}", err=True)
                sys.exit(2)
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main():
    """Serve hybrid models with vLLM on proven ops, and prove them.

    \b
    Example:  python runner.py serve            the bundled model on 127.0.0.1:8000
              python runner.py ops              who serves which op, and why
    """


@main.command(context_settings=PASS_ON)
@POLICY
@CHOICES
@FILES
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, type=int)
@click.option("--require-certified", is_flag=True, help="Serve only what `conform` has passed on this device.")
@click.option("--request-policy", metavar="RULE,RULE", help="Rules for requests, none unless named; see docs/serving.md.")
@click.option("--dry-run", is_flag=True, help="Stop after all checks, before vLLM is started.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL] [VLLM OPTIONS]...")
def serve(arguments, **options):
    """Run vLLM's server with opshim's ops.

    MODEL is a folder with a checkpoint, or a name that vLLM takes; the bundled opshim-tiny if left out. It comes before
    vLLM's own options, which are passed on. The policy is strict unless said otherwise: every op that the model uses
    has a native implementation, or nothing starts. With --nnodes each machine runs this; all but node 0 are --headless.

    \b
    Exit code: 0 stopped by Ctrl-C or SIGTERM, 1 vLLM ended by itself, 2 wrong usage or something that stands in the
    way, 3 an op that nobody may serve. --dry-run ends with the code that serving would not get past, or 0.

    \b
    Example:  python runner.py serve --port 8001 --dtype float16
              python runner.py serve ~/models/mine --policy auto --provider moe_sum=reference --max-model-len 8192
              python runner.py serve ~/models/mine --dry-run
              python runner.py serve --request-policy clamp_max_tokens,no_thinking_when_short,refuse_large_n
    """
    from shim import signals
    from shim.vllm_plugin.serve import serve

    with signals.heard():
        sys.exit(serve(arguments, **options))


@main.command()
@POLICY
@CHOICES
@FILES
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ops(as_json, **options):
    """Show the chain of every op: its candidates, which one serves, and why not the others.

    \b
    Example:  python runner.py ops
              python runner.py ops --policy auto --provider-file mylib.py --json
    """
    from shim.startup import chain_table

    click.echo(chain_table(as_json=as_json, **options))


@main.command()
@click.option("--static", is_flag=True, help="Do not start CUDA: for a machine without a GPU.")
@click.option("--record", is_flag=True, help="Write the files' hashes into manifest.sha256 instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe(static, record, as_json):
    """Check that all is here: files, libraries and their symbols, compilers, vLLM and its hooks, the device.

    Files are compared with manifest.sha256, in a clone or an image; after an edit, --record renews it.

    \b
    Exit code: 0 no FAIL, 1 one or more.

    \b
    Example:  python runner.py probe
              python runner.py probe --static --json
    """
    from shim.probe import probe

    sys.exit(probe(static, as_json, record))


@main.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(url, as_json):
    """Show what each op of a running server did: who answers, failures, refusals, answers that were not finite.

    Counted over all processes of the server, with --nnodes over all its machines (a second late), under Ray over one.

    \b
    Exit code: 0 all is well, 1 a breaker is open or an answer was not finite, 2 nobody answers.

    \b
    Example:  python runner.py status http://127.0.0.1:8000
    """
    from shim.vllm_plugin.status import status

    sys.exit(status(url, as_json))


@main.command()
@click.option("--folder", metavar="FOLDER", help="Where to put the libraries (default: ops_native/lib).")
@click.option("--arch", metavar="LIST", help="GPU archs for nvcc (default: those it knows of 80,86,89,90a,100).")
def build(folder, arch):
    """Compile the native libraries ahead of time. What is up to date is left alone. Needs no GPU; without nvcc the
    library for GPUs is left out.

    \b
    Example:  python runner.py build
              python runner.py build --arch 90a --folder /srv/opshim    then set OPSHIM_LIBRARY_PATH=/srv/opshim
    """
    from ops_native.build import build_command

    build_command(folder, arch)


@main.command()
@OPS
@click.option(
    "--provider", "providers", multiple=True, default=["native"], show_default=True, help="To measure (repeatable)."
)
@FILES
@DEVICE
@click.option("--cold", is_flag=True, help="Seconds to each op's first result in a fresh process, instead.")
@click.option("--threads", default=2, show_default=True, help="Threads of the CPU ops.")
@JSON
def bench(ops, **options):
    """Measure how fast the ops are, and what the shim adds per call: on a CPU next to the references, on a GPU next to
    other providers and the floor of the hardware.

    \b
    Example:  python runner.py bench --device cpu
              python runner.py bench --device cuda --provider native --provider vllm --json bench.json
              python runner.py bench --op moe_sum --provider native --provider mylib --provider-file mylib.py
    """
    from conformance.perf.bench import bench

    sys.exit(bench(ops, **options))


@main.command()
@OPS
@click.option("--provider", multiple=True, default=["native"], show_default=True, callback=only, help="Whose to prove.")
@FILES
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or all (those that are here).")
@click.option("--level", default="quick", show_default=True, help="quick, standard or exhaustive; see README.")
@click.option("--seed", default=0, show_default=True)
@JSON
@click.option("--report-dir", metavar="DIR", help="A folder that the reports join; `report` draws pages from it.")
@click.option("--certificates", metavar="DIR", help="Where to certify (default: where `serve` looks).")
def conform(ops, certificates, **options):
    """Prove that a provider's implementations equal the references, and certify those that do.

    \b
    Exit code: 0 all passed, 1 any failure, or nothing ran, 2 wrong usage. What the provider refuses, with a reason, is
    no failure.

    \b
    Example:  python runner.py conform --op moe_sum
              python runner.py conform --provider mylib --provider-file mylib.py --json result.json
    """
    from conformance.conform import conform
    from shim.certificates import folders

    sys.exit(conform(ops, certificates_dir=certificates or folders()[0], **options))


@main.command("conform-server")
@click.argument("url", metavar="URL")
@click.option("--check", "names", multiple=True, metavar="NAME", help="Only this check (repeatable; default: all).")
@JSON
def conform_server(url, **options):
    """Check from outside what the server at URL promises its clients: lengths, streams, usage, tools, refusals, load.

    Sends about 300 requests, so best to a server that does nothing else. OPENAI_API_KEY is sent as the key.

    \b
    Exit code: 0 all passed (what the server lacks is skipped, with the reason), 1 any failure, 2 wrong usage.

    \b
    Example:  python runner.py conform-server http://127.0.0.1:8000
              python runner.py conform-server http://127.0.0.1:8000 --check stop_strings --json result.json
    """
    from conformance.serving.conform_server import conform_server

    sys.exit(conform_server(url, **options))


@main.command()
@click.argument("file", metavar="FILE")
@click.option("--provider", help="Whose implementation to try (default: the one that failed).")
@FILES
@click.option("--device", help="cpu or cuda (default: where it failed).")
def replay(file, **options):
    """Run a stored failure again, on its own provider and device or on others, and print the verdict.

    FILE is written for every failure that `conform` finds; it holds the case, or the smallest input of a search.

    \b
    Exit code: 0 it passes, 1 it fails or is refused, 2 wrong usage.

    \b
    Example:  python runner.py replay reports/replay/moe_sum-search-examples20-f32.native.cpu.json
              python runner.py replay FILE --provider mylib --provider-file mylib.py --device cuda
    """
    from conformance.search.replay import replay

    sys.exit(replay(file, **options))


@main.command()
@click.argument("folders", nargs=-1, metavar="DIR")
@click.option("--compare", is_flag=True, help="Compare two: DIR is OLD, then NEW.")
def report(folders, compare):
    """Draw a folder of conformance reports as pages (index.html) and as Markdown (summary.md).

    DIR may be a file of `conform --json` as well; of RESULT.json the pages lie in RESULT-report.

    With --compare: what NEW fails, skips or does slower than OLD, as text and as compare.html in NEW.

    \b
    Exit code: 0, 1 something regressed (--compare), 2 no such report.

    \b
    Example:  python runner.py conform --report-dir reports && python runner.py report reports
              python runner.py report --compare reports-before reports
    """
    from conformance.report import diff, html

    if len(folders) != 1 + compare:
        raise click.UsageError("--compare takes two folders, OLD and NEW" if compare else "report takes one folder, DIR")
    sys.exit(diff.show(*folders) if compare else html.show(*folders))


@main.command()
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this op (repeatable); nothing is written.")
def mutants(ops):
    """Show what the suite is worth: how many wrong implementations it convicts, and how many the usual tests do.

    The usual ones are torch.testing.assert_close, vLLM's tolerances, and gpucheck where it is installed. Without --op
    the table goes to docs/results/mutants.md as well.

    \b
    Example:  python runner.py mutants --op moe_sum
    """
    from conformance.mutants.worth import worth

    worth(ops)

if __name__ == "__main__":
    main(prog_name="runner.py")
