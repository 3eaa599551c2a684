"""The commands and their options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

# Defaults that depend on the machine stand in the texts, in round brackets: square ones are taken for markup.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Number = int | None
Real = float | None
Text = str | None
Flag = bool | None
File = Path | None


def run(argv: list[str]) -> int:
    """Runs a command and returns its exit code: 0 done, 1 failed (a check, a rank), 2 wrong arguments."""
    try:
        app(args=argv, prog_name="deep-moe")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return 0


def _show_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"deep_moe {__version__}")
        raise typer.Exit()


@contextmanager
def _reports_errors(command: str) -> Iterator[None]:
    """Turns wrong arguments into code 2 and a rank's failure into code 1, with a line of text each."""
    from .launch import RankFailedError

    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"deep-moe {command}: {error}", err=True)
        raise typer.Exit(2) from None
    except RankFailedError as error:
        typer.echo(f"deep-moe {command}: {error}", err=True)
        raise typer.Exit(1) from None


def _leave_with(command: str, problem: str) -> None:
    if problem:
        typer.echo(f"deep-moe {command}: {problem}", err=True)
        raise typer.Exit(1)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """deep_moe: moves the tokens of Mixture-of-Experts layers."""


@app.command()
def bench(
    ranks: Annotated[
        Number, typer.Option(help="Ranks (default: one a GPU, 2 on one GPU, 4 on the CPU).")
    ] = None,
    device: Annotated[Text, typer.Option(help="auto, cpu or cuda (default: auto).")] = None,
    tokens: Annotated[
        Text, typer.Option(help="Tokens a rank, or 64,512,4096: a run each (default: 512; GPUs: 4096).")
    ] = None,
    ll_tokens: Annotated[Number, typer.Option(help="Tokens a rank in LL mode (default: up to 128).")] = None,
    hidden: Annotated[Number, typer.Option(help="Hidden size (default: 2048; GPUs: 7168).")] = None,
    experts: Annotated[Number, typer.Option(help="Experts over all ranks (default: 64; GPUs: 256).")] = None,
    topk: Annotated[Number, typer.Option(help="Experts a token (default: 8).")] = None,
    groups: Annotated[Number, typer.Option(help="Expert groups of the gate, 0 = none.")] = None,
    topk_groups: Annotated[Number, typer.Option(help="Groups a token may use.")] = None,
    gate: Annotated[Text, typer.Option(help="softmax or sigmoid (default: softmax).")] = None,
    dtype: Annotated[Text, typer.Option(help="bf16, fp16 or fp32 (default: bf16).")] = None,
    fp8: Annotated[
        Flag, typer.Option("--fp8/--no-fp8", help="Dispatch fp8 rows with scales in HT mode too.")
    ] = None,
    mode: Annotated[Text, typer.Option(help="ht, ll or both (default: both; GPUs: ht).")] = None,
    model: Annotated[
        Text, typer.Option(help="Take the shape of a published model, for example DeepSeek-V3.")
    ] = None,
    text: Annotated[
        Text, typer.Option(help="Route the words of this file (default: a text of the package).")
    ] = None,
    routing: Annotated[
        Text, typer.Option(help="text, or made-up routes: uniform, zipf or hot (default: text).")
    ] = None,
    trace: Annotated[
        Text, typer.Option(help="Route by a saved top-k array: .npy or .pt, [..., T, K].")
    ] = None,
    compare: Annotated[
        Text, typer.Option(help="Time torch.distributed too: gloo, or nccl on several GPUs.")
    ] = None,
    num_sms: Annotated[
        Text, typer.Option(help="GPUs: SMs a rank, one number or 8,12,16,24 (default: the library's).")
    ] = None,
    graph: Annotated[Flag, typer.Option("--graph", help="GPUs: calls in CUDA graphs too.")] = None,
    overlap: Annotated[Flag, typer.Option("--overlap", help="GPUs: a GEMM beside a dispatch.")] = None,
    host_cost: Annotated[
        Flag, typer.Option("--host-cost", help="GPUs: pairs of few tokens, which the host's time bounds.")
    ] = None,
    expert_major: Annotated[
        Flag, typer.Option("--expert-major", help="GPUs: rows by expert, beside torch's permute.")
    ] = None,
    iters: Annotated[Number, typer.Option(help="Timed pairs (default: 20); GPUs: chains (10).")] = None,
    warmup: Annotated[Number, typer.Option(help="Those before them (default: 3; GPUs: 1).")] = None,
    check: Annotated[
        Flag, typer.Option("--check/--no-check", help="Compare with a dense computation.")
    ] = None,
    ffn: Annotated[Number, typer.Option(help="Inner width of the experts (default: 16).")] = None,
    seed: Annotated[Number, typer.Option(help="Seed of weights and made-up routes (default: 0).")] = None,
    timeout: Annotated[Real, typer.Option(help="Seconds for the whole run (default: 600).")] = None,
    json: Annotated[File, typer.Option(help="Write parameters, machine and all rows to this file.")] = None,
    plot: Annotated[
        File, typer.Option(help="Draw bars, or curves over tokens or SMs, to this file (needs matplotlib).")
    ] = None,
    against: Annotated[File, typer.Option(help="Compare with this JSON file of an earlier run.")] = None,
    fail_if_slower: Annotated[
        Real, typer.Option(help="With --against: code 1 if a row is slower by more than so many percent.")
    ] = None,
) -> None:
    """Runs MoE layers over ranks of this machine, checks them, and times every step.

    On its GPUs where there are any that this build can use, else on the CPU.
    """
    given: dict[str, Any] = dict(locals())
    json_path, plot_path = given.pop("json"), given.pop("plot")
    del given["against"], given["fail_if_slower"]
    with _reports_errors("bench"):
        from .bench import plan_all, run_bench
        from .compare import verdict

        if fail_if_slower is not None and against is None:
            raise ValueError("fail-if-slower: it needs --against FILE")
        passed, comparison = run_bench(plan_all(given), json_path, plot_path, against)
    problem = "" if passed else "a result differs from the dense computation (see FAILED above)"
    if passed and comparison is not None:
        problem = verdict(comparison, fail_if_slower)
    _leave_with("bench", problem)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="A JSON file of deep-moe bench.")],
    new: Annotated[Path, typer.Argument(help="A later one.")],
    fail_if_slower: Annotated[
        Real, typer.Option(help="Code 1 if a row is slower by more than so many percent.")
    ] = None,
) -> None:
    """Compares two files of deep-moe bench, row by row."""
    with _reports_errors("compare"):
        from .bench import make_console
        from .compare import compare as compare_runs
        from .compare import print_comparison, verdict
        from .runs import read_runs

        comparison = compare_runs(read_runs(old), read_runs(new))
        print_comparison(make_console(), comparison, str(old), str(new))
    _leave_with("compare", verdict(comparison, fail_if_slower))


@app.command()
def plot(
    source: Annotated[Path, typer.Argument(help="A JSON file of deep-moe bench.", metavar="JSON")],
    image: Annotated[Path, typer.Argument(help="The chart: .png, .svg or .pdf.", metavar="IMAGE")],
) -> None:
    """Draws a file of deep-moe bench: curves over tokens or SMs, or bars (needs matplotlib)."""
    with _reports_errors("plot"):
        from .plot import require_matplotlib, write_chart
        from .runs import read_runs

        require_matplotlib()
        write_chart(image, read_runs(source))


@app.command()
def tune(
    ranks: Annotated[
        Number, typer.Option(help="Ranks (default: one a GPU, 2 on one GPU, 4 on the CPU).")
    ] = None,
    device: Annotated[Text, typer.Option(help="auto, cpu or cuda (default: auto).")] = None,
    tokens: Annotated[Number, typer.Option(help="Tokens a rank (default: 512; GPUs: 4096).")] = None,
    hidden: Annotated[Number, typer.Option(help="Hidden size (default: 2048; GPUs: 7168).")] = None,
    experts: Annotated[Number, typer.Option(help="Experts over all ranks (default: 64; GPUs: 256).")] = None,
    topk: Annotated[Number, typer.Option(help="Experts a token (default: 8).")] = None,
    model: Annotated[Text, typer.Option(help="Take the shape of a published model.")] = None,
    dtype: Annotated[Text, typer.Option(help="bf16, fp16 or fp32 (default: bf16).")] = None,
    fp8: Annotated[Flag, typer.Option("--fp8/--no-fp8", help="GPUs: tune fp8 rows too.")] = None,
    routing: Annotated[Text, typer.Option(help="text, uniform, zipf or hot (default: text).")] = None,
    numbers: Annotated[
        Text, typer.Option(help="SMs a rank to try (default: 8,12,16,20,24,32); on the CPU threads.")
    ] = None,
    iters: Annotated[Number, typer.Option(help="Timed pairs; GPUs: chains (default: 20).")] = None,
    timeout: Annotated[Real, typer.Option(help="Seconds for a run (default: 600).")] = None,
    source: Annotated[
        File, typer.Option("--from", help="Choose from a JSON file of deep-moe bench on GPUs; run nothing.")
    ] = None,
    output: Annotated[
        File, typer.Option(help="The tuning file (default: DEEP_MOE_TUNING_FILE, or the user's).")
    ] = None,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Write the tuning file.")] = True,
) -> None:
    """Measures how many SMs are enough for dispatch and combine here, and writes the tuning file."""
    given: dict[str, Any] = dict(locals())
    for name in ("source", "output", "write"):
        del given[name]
    with _reports_errors("tune"):
        from .tune import run_tune

        passed = run_tune(given, source, output, write)
    problem = "" if passed else "a result differs from the dense computation; nothing is written"
    _leave_with("tune", problem)


@app.command()
def plan(
    model: Annotated[Text, typer.Argument(help="A published model, for example DeepSeek-V3.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks over all nodes.")] = 8,
    nodes: Annotated[int, typer.Option(help="Nodes, each an NVLink domain.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens a rank in high-throughput calls.")] = 4096,
    ll_tokens: Annotated[int, typer.Option(help="At most so many tokens a rank in LL calls.")] = 128,
    hidden: Annotated[Number, typer.Option(help="Hidden size.")] = None,
    experts: Annotated[Number, typer.Option(help="Experts over all ranks.")] = None,
    topk: Annotated[Number, typer.Option(help="Experts a token.")] = None,
    groups: Annotated[Number, typer.Option(help="Expert groups of the gate, 0 = none.")] = None,
    topk_groups: Annotated[Number, typer.Option(help="Groups a token may use.")] = None,
    mode: Annotated[str, typer.Option(help="ht, ll or both.")] = "both",
    dtype: Annotated[str, typer.Option(help="Of dispatched rows: bf16, fp16, fp32 or fp8.")] = "fp8",
    gpu: Annotated[str, typer.Option(help="H200, H100, H800, H20, A100, A800, B200 or GB200.")] = "H200",
    nic_gbit: Annotated[float, typer.Option(help="Network of each GPU, Gbit/s.")] = 400.0,
    imbalance: Annotated[float, typer.Option(help="Rows of the busiest rank over the mean.")] = 1.25,
    live: Annotated[int, typer.Option(help="Dispatches whose rows are alive at the same time.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Computes memory, least times and settings for a model's MoE layer. Needs no GPU."""
    given: dict[str, Any] = dict(locals())
    as_json, given["num_experts"] = given.pop("json"), given.pop("experts")
    from ..planning import plan as make_plan
    from .plan import show, to_json

    try:
        found = make_plan(given.pop("model"), **given)
    except ValueError as error:
        typer.echo(f"deep-moe plan: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(to_json(found) if as_json else show(found))


@app.command()
def doctor() -> None:
    """Says what this build and this machine can do, and what to do about what is missing."""
    from .doctor import run_doctor

    raise typer.Exit(0 if run_doctor() else 1)
