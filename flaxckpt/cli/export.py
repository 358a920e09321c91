"""`flaxckpt export A B.safetensors`: the arrays of a checkpoint of any format as safetensors."""

from __future__ import annotations

import argparse

from flaxckpt.cli.command import FINE, CliError, Output, byte_count, options_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `export`."""
    parser.add_argument("a", metavar="A", help="path or URL of a checkpoint of any format")
    parser.add_argument("b", metavar="B", help="path or URL of a .safetensors file")
    parser.add_argument("--dtype", help="dtype of floating-point arrays, such as bfloat16")
    parser.add_argument(
        "--max-shard-bytes",
        metavar="SIZE",
        type=byte_count,
        help="largest file, such as 5GB",
    )
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        nargs="+",
        action="extend",
        default=[],
        help="rename a tensor; without NEW, leave it out",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")


def run(args: argparse.Namespace, out: Output) -> int:
    """Writes the arrays of the checkpoint at A to B."""
    from flaxckpt.exporting import export

    options = options_of(args)
    try:
        export(
            args.a,
            args.b,
            rename=_renamed(args.rename),
            dtype=args.dtype,
            max_shard_bytes=args.max_shard_bytes,
            overwrite=args.overwrite,
            options=options,
        )
    except TypeError as error:  # of numpy
        raise CliError(f"--dtype {args.dtype}: {error}") from error
    except ValueError as error:
        raise CliError(str(error)) from error
    out.document({"from": args.a, "to": args.b})
    out.lines(f"{args.a} -> {args.b}")
    return FINE


def _renamed(pairs: list[str]) -> dict[str, str | None] | None:
    """The new names that `--rename` gives.

    Raises:
      CliError: if a value is not OLD=NEW.
    """
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise CliError(f"--rename needs OLD=NEW, or OLD= to leave the tensor out, got {wrong[0]}")
    split = (pair.split("=", 1) for pair in pairs)
    return {old: new or None for old, new in split} or None
