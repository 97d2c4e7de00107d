"""``empo2 memory``: what an agent has learned, to look at, to search, to move and to thin out."""

import argparse
import difflib
import json
import math
import os
import re
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from empo2.memory import (
    BySimilarity,
    EmbedderError,
    MemoryFileError,
    MemoryStore,
    Policy,
    SentenceEmbedder,
    embedder_name,
)
from empo2.memory.browse import (
    Conditions,
    embedder_of,
    find_tips,
    plays,
    reading,
    scope_counts,
    scopes,
    stored_tips,
)
from empo2.memory.transfer import export_records, import_records, read_records
from empo2.recipe.cli.memory_tables import (
    returns_table,
    scope_fields,
    scope_text,
    scopes_table,
    tips_table,
    value_lines,
)
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.gateway.memory import retrieval_policy
from empo2.recipe.run_folder import MEMORY_FILE

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def add_memory_command(commands: Any) -> None:
    """Hang ``memory`` and its verbs into the sub-commands of ``empo2``."""
    memory = commands.add_parser("memory", help="show, search, move and thin out what an agent has learned")
    verbs = memory.add_subparsers(required=True, metavar="VERB")

    show = _verb(verbs, "show", _show, "show tips", "show runs/demo --scope task=find-animal --order value -n 5")
    _add_memory(show)
    show.add_argument("--order", choices=["best", "newest", "used", "value"], default="best", help="default: best")
    _add_scope(show)
    _add_count(show, 20)

    search = _verb(
        verbs,
        "search",
        _search,
        "show the tips that would be found for a state",
        'search runs/demo "You are in the kitchen. The door is closed." --policy value',
    )
    _add_memory(search)
    search.add_argument("text", metavar="TEXT", help="the state; embedded by the model that made the memory's keys")
    search.add_argument(
        "--policy", choices=["score", "similarity", "value"], default="score", help="memory.retrieval; default: score"
    )
    _add_scope(search)
    _add_count(search, 10)

    stats = _verb(verbs, "stats", _stats, "show sizes, hit rates, returns and learned values", "stats runs/demo")
    _add_memory(stats)
    _add_scope(stats)

    example = "export runs/demo --output tips.jsonl"
    export = _verb(verbs, "export", _export, "write tips, states and plays as JSON lines", example)
    _add_memory(export)
    export.add_argument("--output", type=Path, metavar="FILE", help="a new file; default: standard output")

    bring = _verb(
        verbs,
        "import",
        _import,
        "add an export to a memory, or make a new one of it",
        "import tips.jsonl new.sqlite --embedder all-MiniLM-L6-v2",
        "Every state is embedded again: so a memory moves to another embedder. Tips and\n"
        "plays that the memory knows are left alone; the visits of states add up.",
    )
    bring.add_argument("file", type=Path, metavar="FILE", help="what `empo2 memory export` has written")
    bring.add_argument("memory", type=Path, metavar="MEMORY", help="an existing memory, not in use, or a new file")
    bring.add_argument("--embedder", metavar="NAME", help="default: the memory's own; memory.embedder for a new one")
    bring.add_argument("--device", default="cpu", help="of the embedder, cpu or cuda; default: cpu")

    prune = _verb(
        verbs,
        "prune",
        _prune,
        "remove the tips that meet all conditions given",
        "prune runs/demo --never-shown --older-than 7d --yes",
        "Without --yes it only says which these are. With it, no run may be using the memory.",
    )
    _add_memory(prune)
    _add_scope(prune)
    prune.add_argument("--score-below", type=_number, metavar="X", help="the score of the tip's episode")
    prune.add_argument("--value-below", type=_number, metavar="X", help="the tip's learned value Q")
    prune.add_argument("--never-shown", action="store_true", help="in no episode")
    prune.add_argument("--older-than", type=_age, metavar="AGE", help="such as 30m, 12h, 7d or 2w")
    prune.add_argument("--yes", action="store_true", help="remove them")


def _verb(verbs: Any, name: str, run: Any, text: str, example: str, more: str = "") -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.\n{more}",
        epilog=f"example:\n  empo2 memory {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.set_defaults(run=partial(_run, run))
    return verb


def _add_memory(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "memory",
        type=Path,
        metavar="MEMORY",
        help="a memory file, or the folder of a run or of a checkpoint",
    )


def _add_scope(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--scope",
        metavar="SCOPE",
        help='those with these fields: task=find-animal,variation=3 or {"task": "find-animal"}; default: all',
    )


def _add_count(verb: argparse.ArgumentParser, default: int) -> None:
    verb.add_argument("-n", type=_count, default=default, metavar="N", help=f"tips at most; default: {default}")


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return number


def _age(text: str) -> int:
    """Seconds."""
    if not (match := re.fullmatch(r"([0-9]{1,6})([mhdw])", text)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an age; give 30m, 12h, 7d or 2w (minutes, hours, days, weeks)"
        )
    return int(match[1]) * _SECONDS[match[2]]


def _run(verb: Callable[[argparse.Namespace, Console], None], options: argparse.Namespace) -> None:
    options.memory = _memory_file(options.memory)
    try:
        verb(options, Console(highlight=False, markup=False, emoji=False))
    except BrokenPipeError:  # as of `export | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
    except (MemoryFileError, EmbedderError, OSError, sqlite3.Error) as error:
        raise ConfigError(" ".join(str(error).split())) from None


def _memory_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / MEMORY_FILE).is_file():
        raise ConfigError(
            f"{path}: a folder without {MEMORY_FILE}; give a memory file, or the folder of a run or of a checkpoint"
        )
    return path / MEMORY_FILE


def _chosen_scopes(db: sqlite3.Connection, asked: str | None) -> list[str]:
    """The scopes with the fields that are asked for, or the one of exactly that text.

    Raises:
        ConfigError: there is none.
    """
    there = scopes(db)
    if asked is None:
        return there
    if asked in there:
        return [asked]
    parts = (part.partition("=") for part in asked.split(","))
    fields = scope_fields(asked) or {name: value for name, equals, value in parts if equals}
    matching = [scope for scope in there if fields and fields.items() <= scope_fields(scope).items()]
    if not matching:
        names = [scope_text(scope) for scope in there]
        nearest = difflib.get_close_matches(scope_text(asked), names, 1, cutoff=0)
        hint = f"the nearest is {nearest[0]}" if nearest else "the memory is empty"
        raise ConfigError(f"--scope {asked}: there is no such scope; {hint}")
    return matching


def _show(options: argparse.Namespace, console: Console) -> None:
    with reading(options.memory) as db:
        tips = stored_tips(db, _chosen_scopes(db, options.scope), order=options.order, limit=options.n)
    console.print(tips_table(tips) if tips else "no tips yet")


def _search(options: argparse.Namespace, console: Console) -> None:
    with reading(options.memory) as db:
        chosen = _chosen_scopes(db, options.scope)
        if not chosen:
            return console.print("no tips yet")
        name, dimension = embedder_of(db)
        embedder = SentenceEmbedder(name)
        if embedder.dimension != dimension:
            raise ConfigError(
                f"{options.memory}: its keys have {dimension} dimensions, those of {name!r} now have "
                f"{embedder.dimension}; export it and import it into a new file"
            )
        key = embedder.embed([options.text])[0]
        found = find_tips(db, chosen, key, _policy(options.policy, options.n))
        nearest = find_tips(db, chosen, key, BySimilarity(1, -math.inf))
    if found:
        console.print(tips_table([tip for tip, _ in found], [similarity for _, similarity in found]))
    elif nearest:
        least = load_settings().memory.min_similarity
        console.print(f"no tip has a cosine above {least}; the highest is {nearest[0].similarity:.2f}:")
        console.print(tips_table([nearest[0].tip], [nearest[0].similarity]))
    else:
        console.print("no tips yet")
    return None


def _policy(name: str, count: int) -> Policy:
    """As the gateway's, with the settings of config.yaml, but without chance."""
    candidates = max(count, load_settings().memory.candidates)
    choice = {"retrieval": name, "top_k": count, "candidates": candidates, "exploration": 0.0}
    return retrieval_policy(load_settings(layer={"memory": choice}))


def _stats(options: argparse.Namespace, console: Console) -> None:
    with reading(options.memory) as db:
        chosen = _chosen_scopes(db, options.scope)
        name, dimension = embedder_of(db)
        counts, played = scope_counts(db, chosen), plays(db, chosen)
        tips = stored_tips(db, chosen, order="used")
    log = options.memory.with_name(options.memory.name + "-wal")
    size = options.memory.stat().st_size + (log.stat().st_size if log.exists() else 0)
    console.print(f"{options.memory}: {size / 1e6:,.1f} MB, keys of {name} ({dimension} dimensions)\n", soft_wrap=True)
    console.print(scopes_table(counts, played))
    if played:
        console.print()
        console.print(returns_table(played))
    if tips:
        console.print()
        unseen = sum(tip.shown == 0 for tip in tips)
        console.print("\n".join(value_lines(np.array([tip.value for tip in tips]))))
        console.print(f"\nnever shown: {unseen:,} of {len(tips):,} tips ({unseen / len(tips):.0%})")
    if tips and tips[0].shown:
        console.print("most shown:\n")
        console.print(tips_table([tip for tip in tips[:5] if tip.shown]))


def _export(options: argparse.Namespace, console: Console) -> None:
    with reading(options.memory) as db:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in export_records(db))
        if options.output is None:
            sys.stdout.writelines(lines)
            sys.stdout.flush()
            return
        if options.output.exists():
            raise ConfigError(f"--output {options.output}: exists already; give a new file")
        unfinished = options.output.with_name(options.output.name + ".tmp")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.writelines(lines)
            unfinished.rename(options.output)
        finally:
            unfinished.unlink(missing_ok=True)


def _import(options: argparse.Namespace, console: Console) -> None:
    records = read_records(options.file)
    name = options.embedder or load_settings().memory.embedder
    if options.memory.exists():
        with reading(options.memory) as db:
            own, dimension = embedder_of(db)
        if options.embedder is not None and embedder_name(options.embedder) != own:
            raise ConfigError(
                f"--embedder {options.embedder}: {options.memory} has keys of {own!r}; give a new file, to which it "
                "can be exported, too"
            )
        name = own
        # Refuses a memory in use here, and not when the model has been loaded for many seconds.
        MemoryStore(options.memory, embedder=own, dimension=dimension).close()
    elif not options.memory.parent.is_dir():
        raise ConfigError(f"{options.memory}: there is no folder {options.memory.parent}")
    embedder = SentenceEmbedder(name, device=options.device)
    progress = partial(track, description="embedding", console=Console(stderr=True))
    done = import_records(options.memory, records, embedder, progress)
    console.print(
        f"{options.memory}: {done.tips:,} tips added ({done.known_tips:,} known), visits of {done.states:,} states, "
        f"{done.plays:,} plays ({done.known_plays:,} known)",
        soft_wrap=True,
    )


def _prune(options: argparse.Namespace, console: Console) -> None:
    conditions = Conditions(
        score_below=options.score_below,
        value_below=options.value_below,
        created_before=None if options.older_than is None else time.time() - options.older_than,
        never_shown=options.never_shown,
    )
    if conditions == Conditions():
        raise ConfigError("prune: give at least one of --score-below, --value-below, --never-shown and --older-than")
    with reading(options.memory) as db:
        chosen = _chosen_scopes(db, options.scope)
        tips = stored_tips(db, chosen, order="best", conditions=conditions)
        total = sum(count.tips for count in scope_counts(db, chosen))
        embedder, dimension = embedder_of(db)
    if options.yes:
        with closing(MemoryStore(options.memory, embedder=embedder, dimension=dimension)) as store:
            removed = store.remove_tips([tip.id for tip in tips])
        console.print(f"{removed:,} of {total:,} tips removed")
        return
    console.print(f"{len(tips):,} of {total:,} tips would be removed; nothing is, without --yes")
    if tips:
        console.print(f"\nthe {min(10, len(tips))} best of them:\n")
        console.print(tips_table(tips[:10]))
