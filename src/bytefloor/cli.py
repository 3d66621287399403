"""The command line: verbs only. Heavy imports stay inside the commands, so that --help answers at once."""

from __future__ import annotations

import io
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bytefloor import __version__
from bytefloor.cli_bench import bench_app
from bytefloor.cli_flags import ContextOption, DeviceOption, KvBudgetOption, KvOption, ModelOption, parse_size
from bytefloor.cli_frontier import frontier
from bytefloor.cli_perplexity import perplexity
from bytefloor.cli_profile import profile
from bytefloor.cli_quantize import quantize
from bytefloor.cli_verify import verify
from bytefloor.errors import BytefloorError, RequestError
from bytefloor.tools import interrupt
from bytefloor.tools.packages import SERVER, require


class Verbs(TyperGroup):
    """Turns what a user can put right into one line and exit status 2; any other exception keeps its traceback."""

    def main(self, *args: Any, **extra: Any) -> Any:
        extra |= {"prog_name": "bytefloor", "standalone_mode": False}
        try:
            status = super().main(*args, **extra)
        except Exception as error:
            message = _complaint(error)
            if message is None:
                raise
            typer.echo(f"bytefloor: error: {' '.join(message.split())}", err=True)
            status = 2
        sys.exit(status)


def _complaint(error: Exception) -> str | None:
    """What to tell the user; None for a bug."""
    if isinstance(error, BytefloorError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    if hasattr(error, "format_message"):
        # A wrong flag or argument. The class is click's, of which typer may carry its own copy.
        context = getattr(error, "ctx", None)
        verb = context.command_path if context is not None else "bytefloor"
        words = error.format_message().rstrip(".")
        return f"{words}{_found(error.__cause__)}{_place_of(words, verb)}; see {verb} --help"
    return None


def _place_of(words: str, verb: str) -> str:
    """Where a bare word belongs, which other tools take without an option."""
    if not words.startswith(("Got unexpected extra argument", "No such command")) or verb == "bytefloor":
        return ""
    if verb.endswith("run"):
        return ": a prompt goes behind -p, a model behind -m"
    if verb.endswith(("perplexity", "frontier")):
        return ": a text's file goes behind -f, a model behind -m"
    return ": a model goes behind -m"


def _found(cause: BaseException | None) -> str:
    """The value that a validation error is about: its words say only what was expected."""
    errors = getattr(cause, "errors", None)
    return f", found {errors()[0]['input']!r}" if callable(errors) else ""


app = typer.Typer(
    cls=Verbs,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quantised language models, measured against the floor their bytes set.",
)


TokensOption = Annotated[int, typer.Option("-n", "--tokens", help="Most tokens of an answer; -1: until it ends.")]
SeedOption = Annotated[int | None, typer.Option("-s", "--seed", help="Makes sampling repeatable; 0 is a seed.")]
LoopOption = Annotated[
    bool, typer.Option("--no-loop-detection", help="Gemma: go on where an answer only repeats itself.")
]
TemperatureOption = Annotated[float, typer.Option("--temp", help="0 takes the best token always.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Keep the k best; 0: all.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Keep the best until their sum reaches p; 1: all.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="Keep what has this share of the best's probability.")]
PenaltyOption = Annotated[float, typer.Option("--repeat-penalty", help="Above 1 makes repeated tokens less likely.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer at this text; may be repeated.")
]
WeightsOption = Annotated[
    str, typer.Option("--weights", help="float32, or bf16: half the bytes a token reads, a little less exact.")
]
SpeculationOption = Annotated[
    bool, typer.Option("--no-speculation", help="Never compute ahead what the text has said before.")
]
ThinkingOption = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Ask the template for thinking, where it knows of it.")
]
BudgetOption = Annotated[
    int | None, typer.Option("--reasoning-budget", min=0, metavar="N", help="Think, for so many tokens at most.")
]
SystemOption = Annotated[str | None, typer.Option("--system", help="A system message.")]


def _settings(
    context: int | None,
    device: str,
    weights: str,
    kv: str | None,
    kv_budget: int | None,
    n_sequences: int = 1,
    speculates: bool = True,
    **sampling: Any,
) -> tuple[Any, Any]:
    """EngineOptions and SamplingParams from flags."""
    from bytefloor.engine.loading import WEIGHT_TYPES, EngineOptions, check_budget, check_kv
    from bytefloor.engine.sampling_params import SamplingParams

    if weights not in WEIGHT_TYPES:
        raise RequestError(f"--weights {weights}: expected {' or '.join(WEIGHT_TYPES)}")
    check_kv(kv)
    check_budget(kv_budget, kv)
    options = EngineOptions(
        context=context, device=device, weights=weights, n_sequences=n_sequences, kv=kv, speculates=speculates,
        kv_budget=kv_budget,
    )  # fmt: skip
    return options, SamplingParams(**sampling)


@app.command()
def run(
    model: ModelOption = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt; '-' reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Read the prompt from a file.")] = None,
    tokens: TokensOption = -1,
    context: ContextOption = None,
    seed: SeedOption = None,
    temp: TemperatureOption = 0.8,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.05,
    repeat_penalty: PenaltyOption = 1.0,
    stop: StopOption = None,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    reasoning_budget: BudgetOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
    logprobs: Annotated[int, typer.Option("--logprobs", help="With --json: the n best tokens at each place.")] = 0,
    json_schema: Annotated[
        str | None, typer.Option("--json-schema", metavar="FILE|JSON", help="Answer with JSON of this schema.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option("--grammar", metavar="FILE", help="Answer as this Lark or GBNF grammar says.")
    ] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="Answer what matches, from first to last.")] = None,
    no_speculation: SpeculationOption = False,
    no_loop_detection: LoopOption = False,
    weights: WeightsOption = "float32",
    kv: KvOption = None,
    kv_budget: KvBudgetOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Answer one prompt."""
    with interrupt.at_once():
        from bytefloor.tools.run import RunOptions, answer_once, read_grammar, read_prompt
        from bytefloor.tools.session import check_texts

    if logprobs and not json_output:
        raise RequestError("--logprobs: only --json shows them; add it")
    text = read_prompt(prompt, file)
    check_texts(system=system, stop=stop, json_schema=json_schema, regex=regex)
    options, sampling = _settings(
        context, device, weights, kv, kv_budget, speculates=not no_speculation, temperature=temp, top_k=top_k,
        top_p=top_p, min_p=min_p, repetition_penalty=repeat_penalty, seed=seed, n_logprobs=logprobs,
    )  # fmt: skip
    form = read_grammar(json_schema, grammar, regex)
    asked = RunOptions(
        sampling, tokens, tuple(stop or ()), system, thinking, raw, json_output, form, reasoning_budget,
        not no_loop_detection,
    )  # fmt: skip
    raise typer.Exit(answer_once(model, text, options, asked))


@app.command()
def chat(
    model: ModelOption = None,
    tokens: TokensOption = -1,
    context: ContextOption = None,
    seed: SeedOption = None,
    temp: TemperatureOption = 0.8,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.05,
    repeat_penalty: PenaltyOption = 1.0,
    stop: StopOption = None,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Do not show reasoning.")] = False,
    no_loop_detection: LoopOption = False,
    weights: WeightsOption = "float32",
    kv: KvOption = None,
    kv_budget: KvBudgetOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Talk with a model, turn by turn; /help inside lists the commands."""
    with interrupt.at_once():
        from bytefloor.tools.chat import ChatOptions, converse
        from bytefloor.tools.session import check_texts

    check_texts(system=system, stop=stop)
    options, sampling = _settings(
        context, device, weights, kv, kv_budget, temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repeat_penalty, seed=seed,
    )  # fmt: skip
    asked = ChatOptions(
        sampling, tokens, tuple(stop or ()), system, thinking, not hide_thinking, not no_loop_detection
    )  # fmt: skip
    converse(model, options, asked)


@app.command()
def serve(
    model: ModelOption = None,
    context: ContextOption = None,
    host: Annotated[str, typer.Option("--host", help="Where to listen; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8080,
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="Requests at once; each has its -c.")] = 4,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="BYTEFLOOR_API_KEY", help="Without it everybody may ask.")
    ] = None,
    alias: Annotated[str | None, typer.Option("--alias", help="What requests call the model.")] = None,
    cors: Annotated[str, typer.Option("--cors", help="Origins of pages that may ask, by commas; * for all.")] = "",
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a request may take.")] = 600.0,
    max_body: Annotated[
        Any, typer.Option("--max-body", parser=parse_size, metavar="N", help="Bytes of a request (16m).")
    ] = "16m",
    no_speculation: SpeculationOption = False,
    weights: WeightsOption = "float32",
    kv: KvOption = None,
    kv_budget: KvBudgetOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Answer over HTTP, as OpenAI's API does."""
    require(SERVER, "serve")
    with interrupt.at_once():
        from bytefloor.server.service import ServerOptions
        from bytefloor.tools.serve import serve_model
        from bytefloor.tools.session import check_texts

    check_texts(alias=alias)
    options, _ = _settings(context, device, weights, kv, kv_budget, n_sequences=parallel, speculates=not no_speculation)
    origins = tuple(origin.strip() for origin in cors.split(",") if origin.strip())
    allowed = ServerOptions(alias, api_key, origins, timeout, max_body)
    raise typer.Exit(serve_model(model, host, port, options, allowed))


@app.command()
def inspect(
    model: Annotated[str | None, typer.Argument(help="A file, a directory, or a pulled name.")] = None,
    model_option: ModelOption = None,
    context: ContextOption = None,
    kv: KvOption = None,
    gb_s: Annotated[float, typer.Option("--gb-s", help="Memory bandwidth to compute the floor for.")] = 1000.0,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what is in a model file and what a token costs."""
    with interrupt.at_once():
        from bytefloor.engine.synthetic import is_synthetic, make_checkpoint
        from bytefloor.files.checkpoint import open_checkpoint
        from bytefloor.tools.inspect import inspect as make_report
        from bytefloor.tools.inspect_view import print_json, print_report
        from bytefloor.tools.models import find_model

    if not 0 < gb_s < math.inf:
        raise RequestError(f"--gb-s {gb_s}: expected a bandwidth above 0")
    if model is not None and model_option is not None:
        raise RequestError(f"both {model} and -m {model_option} were given; one of them is enough")
    name = model if model is not None else model_option
    is_drawn = name is not None and is_synthetic(name)
    checkpoint = make_checkpoint(str(name), "cpu") if is_drawn else open_checkpoint(find_model(name))
    report = make_report(checkpoint, context, kv)
    if json_output:
        print_json(report, gb_s)
    else:
        print_report(report, gb_s, tensors)


app.add_typer(bench_app, name="bench")
app.command()(profile)
app.command()(verify)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="org/repo, or org/repo:Q4_K_M for one GGUF of several.")],
    revision: Annotated[str | None, typer.Option("--revision", help="A branch, tag or commit.")] = None,
) -> None:
    """Download a model; a broken download goes on where it stopped."""
    from bytefloor.tools.models import pull as download

    with interrupt.at_once():
        path = download(name, revision)
    typer.echo(path)
    typer.echo(f"run it with: bytefloor run -m {shlex.quote(str(path) if revision else name)}", err=True)


app.command()(quantize)
app.command()(perplexity)
app.command()(frontier)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"bytefloor {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Quantised language models, measured against the floor their bytes set."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """What the ``bytefloor`` command runs."""
    # OpenMP's threads spin between two small operations. Beside another busy process that makes a token 10 to 30 times
    # slower; spinning only a little costs 3 % on an idle machine. Read when torch is imported, so it is set here.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    _mend_streams()
    app()


def _mend_streams() -> None:
    """A stream that the caller closed (``>&-``) is None in Python; whatever then prints would fail or go elsewhere."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Names and texts may hold what a terminal cannot show: that is escaped rather than fatal.
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
