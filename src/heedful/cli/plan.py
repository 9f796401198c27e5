"""`heedful plan` and `heedful seprank`: budgets to shapes, verdicts on shapes, and the theory's ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful._files import write
from heedful._text import quantity
from heedful.cli.arguments import AsJson, echo, in_options, spellings

if TYPE_CHECKING:
    from heedful.lens.depth import Projection


def plan(
    context: typer.Context,
    budget: Annotated[
        str | None, typer.Argument(metavar="BUDGET", help="Parameters in the layers: 1.3e9, 1.3B, 350M, 1,300,000,000.")
    ] = None,
    params: Annotated[str | None, typer.Option(help="The same as BUDGET.")] = None,
    flops: Annotated[str | None, typer.Option(help="Training compute, instead of BUDGET: 1e21.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Bytes for weights and optimizer, instead of BUDGET: 80GB.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Depth, instead of BUDGET; the law gives the width.")] = None,
    width: Annotated[int | None, typer.Option(help="Width, instead of BUDGET; the law gives the depth.")] = None,
    vocab: Annotated[int, typer.Option(help="Vocabulary.")] = 50257,
    seq_len: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 1024,
    gated: Annotated[bool, typer.Option("--gated", help="Gated feed-forward layers, as in Llama.")] = False,
    kv_ratio: Annotated[int, typer.Option(help="Query heads for each key head.")] = 1,
    head_dim: Annotated[int | None, typer.Option(help="Head size.", show_default="near 64 or 128")] = None,
    head_multiple_of: Annotated[int, typer.Option(help="Head sizes are multiples of this even number.")] = 8,
    multiple_of: Annotated[int, typer.Option(help="Widths are multiples of this.")] = 64,
    max_depth: Annotated[int | None, typer.Option(help="At most this many layers.")] = None,
    include_embeddings: Annotated[
        bool, typer.Option("--include-embeddings", help="Count embeddings in the budget.")
    ] = False,
    law: Annotated[str, typer.Option(help="levine2020, constant_aspect or depth_delusion.")] = "levine2020",
    hf: Annotated[str | None, typer.Option(help="Print config.json of a kind: gpt2, llama, mistral, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="With --hf: the folder to write config.json to.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--audit", metavar="MODEL", help="Judge demo, a folder, config.json, 48x1600 or gpt2-xl."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the published projections, recomputed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Recommends depth and width for a budget, or compares a model with the laws."""
    from heedful.bridges.configs import is_gated
    from heedful.lens import depth

    if budget is not None and params is not None:
        raise InvalidArgument(f"BUDGET {budget} and --params {params} say the same; give one")
    if table:
        _alone(context, "table", "as_json")
        rows = depth.published_table()
        echo(rows, as_json, _published)
        return
    if model is not None:
        _alone(context, "model", "law", "as_json")
        verdict = depth.audit(str(Path(model).expanduser()) if model.strip() else model, law=law)
        echo(verdict, as_json)
        return
    if out is not None and hf is None:
        raise InvalidArgument("--out writes a config.json; say which kind with --hf, as in --hf llama")
    with _named_as_given(context, budget is not None or params is None):
        best = depth.plan(
            params if budget is None else budget,
            flops=flops,
            memory=memory,
            layers=layers,
            width=width,
            vocab=vocab,
            # What is written as a Llama is gated; a plan for it is to be one.
            gated=gated or (hf is not None and is_gated(hf)),
            kv_ratio=kv_ratio,
            head_dim=head_dim,
            head_multiple_of=head_multiple_of,
            multiple_of=multiple_of,
            seq_len=seq_len,
            include_embeddings=include_embeddings,
            max_depth=max_depth,
            law=law,
        )
    if hf is not None:
        config = json.dumps(best.to_config(hf), indent=2)
        if out is None:
            typer.echo(config)
            return
        _write(config + "\n", out.expanduser())
    echo(best, as_json)
    if hf is not None and out is not None and not as_json:
        typer.echo(f"wrote {out.expanduser() / 'config.json'}")


@contextmanager
def _named_as_given(context: typer.Context, by_place: bool) -> Iterator[None]:
    """Errors of the library in the shell's words: what has an argument and an option is called as it was given."""
    try:
        yield
    except InvalidArgument as error:
        spelled = spellings(context.command) | ({"params": "BUDGET"} if by_place else {})
        raise InvalidArgument(in_options(str(error), spelled)) from None


def seprank(
    depth: Annotated[int, typer.Option(help="Layers.")],
    width: Annotated[int, typer.Option(help="Channels.")],
    heads: Annotated[int, typer.Option(help="Heads; they must divide the width.")] = 1,
    n_tokens: Annotated[int, typer.Option("--tokens", help="Tokens, half on each side.")] = 4,
    embedding_rank: Annotated[int | None, typer.Option(help="Dimension of the space that tokens lie in.")] = None,
    residual: Annotated[bool, typer.Option("--residual", help="With residual connections.")] = False,
    seeds: Annotated[int, typer.Option(help="Draws of the weights.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Computes the exact separation rank of a small network of the theory, and its bound."""
    from heedful.lens.depth import sep_bound, separation_rank

    check_whole(seeds=seeds)
    options = {"embedding_rank": embedding_rank, "residual": residual}
    ranks = [separation_rank(depth, width, heads, n_tokens, **options, seed=seed) for seed in range(seeds)]
    bound = sep_bound(min(width, embedding_rank or width), depth)
    result = {"depth": depth, "width": width, "heads": heads, "tokens": n_tokens, "ranks": ranks, "bound": bound}
    if as_json:
        echo(result, as_json)
        return
    typer.echo(
        f"separation rank {max(ranks)} of at most {bound} (depth {depth}, width {width}, {quantity(heads, 'head')},"
    )
    draws = f"{quantity(n_tokens, 'token')}, {quantity(seeds, 'draw')}"
    typer.echo(f"{draws} over the field of 2^31 - 1 elements: {', '.join(map(str, ranks))})")


def _write(config: str, folder: Path) -> None:
    file = folder / "config.json"
    if file.exists() or (folder.exists() and not folder.is_dir()):
        raise InvalidArgument(f"{file if file.exists() else folder} exists; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write(file, config)


def _alone(context: typer.Context, *names: str) -> None:
    """Refuses what was given beside these options and would be ignored."""
    spelled = spellings(context.command)
    given = [spelled[name] for name in context.params if _was_given(context, name) and name not in names]
    if given:
        first, *rest = (spelled[name] for name in names)
        raise InvalidArgument(f"{first} goes with {' and '.join(rest)} alone; drop {', '.join(given)}")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _published(rows: tuple[Projection, ...]) -> str:
    lines = [
        "                            trained           the law      printed  depth for",
        "model           12 L d²    L x d             L      d     L      d  its width",
    ]
    for row in rows:
        trained = f"{row.layers} x {row.width}" if row.layers else "-"
        own = f"{row.depth_for_width:.1f}" if row.depth_for_width else "-"
        lines.append(
            f"{row.name:<13} {row.params:>9.3g}    {trained:<12} {row.depth:>6.2f} {row.width_at_depth:>6.0f}"
            f"  {row.printed_depth:>4} {row.printed_width:>6}  {own:>9}"
        )
    return "\n".join(lines)
