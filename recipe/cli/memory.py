"""``empo2 memory``: show, search, export, import and prune what an agent has learned."""

import contextlib
import difflib
import json
import math
import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
import yaml
from rich.console import Console, RenderableType
from rich.progress import track

from empo2.memory import BySimilarity, EmbedderError, MemoryFileError, MemoryStore, SentenceEmbedder, embedder_name
from empo2.memory.browse import embedder_of, find_tips, plays, scope_counts, scopes, stored_tips
from empo2.memory.file import reading
from empo2.memory.transfer import export_records, import_records, read_records
from empo2.recipe.cli.memory_tables import returns_table, scope_fields, scope_text, scopes_table, tips_table
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.checkpoints import run_of
from empo2.recipe.gateway.memory import retrieval_policy
from empo2.recipe.printed import printable_json
from empo2.recipe.run_folder import CHECKPOINTS, CONFIG_FILE, MEMORY_FILE, is_complete, last_checkpoint, mark_complete

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}

app = typer.Typer(rich_markup_mode=None, help="Show, search, move and thin out what an agent has learned.")


def _age(text: str) -> int:
    if not (match := re.fullmatch(r"([0-9]{1,6})([mhdw])", text)):
        raise typer.BadParameter(f"{text!r} is not an age; give 30m, 12h, 7d or 2w (minutes, hours, days, weeks)")
    return int(match[1]) * _SECONDS[match[2]]


def _memory_file(path: Path) -> Path:
    if path.is_dir() and not (path / MEMORY_FILE).is_file():
        raise ConfigError(f"{path}: a folder without {MEMORY_FILE}; give a memory file, or the folder of a run")
    return path / MEMORY_FILE if path.is_dir() else path


Memory = Annotated[
    Path,
    typer.Argument(
        callback=_memory_file, metavar="MEMORY", help="A memory file, or the folder of a run or of a checkpoint."
    ),
]
Scope = Annotated[
    str | None,
    typer.Option(
        metavar="SCOPE",
        help='Scopes with these fields: task=find-animal,variation=3 or {"task": "find-animal"}.  [default: all]',
    ),
]
Count = Annotated[int, typer.Option("-n", min=1, max=1_000_000, metavar="N", help="Tips at most.")]


def _example(arguments: str) -> str:
    return f"\b\nexample:\n  empo2 memory {arguments}"


def _print(*objects: RenderableType, soft_wrap: bool = False) -> None:
    Console(highlight=False, markup=False, emoji=False).print(*objects, soft_wrap=soft_wrap)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # as of `export | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
    except (MemoryFileError, EmbedderError, OSError, sqlite3.Error) as error:
        raise ConfigError(" ".join(str(error).split())) from None


@app.command(epilog=_example("show runs/demo --scope task=find-animal --order value -n 5"))
@one_line_errors()
def show(
    memory: Memory,
    order: Annotated[Literal["best", "newest", "used", "value"], typer.Option(help="What comes first.")] = "best",
    scope: Scope = None,
    count: Count = 20,
) -> None:
    """Show tips."""
    with reading(memory) as db:
        tips = stored_tips(db, chosen_scopes(db, scope), order=order)[:count]
    _print(tips_table(tips) if tips else "no tips yet")


@app.command(epilog=_example('search runs/demo "You are in the kitchen. The door is closed." --policy value'))
@one_line_errors()
def search(
    memory: Memory,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The state; embedded by the model that made the memory's keys.")
    ],
    policy: Annotated[
        Literal["score", "similarity", "value"] | None,
        typer.Option(help="What is found first, as memory.retrieval.  [default: as the run, or score]"),
    ] = None,
    scope: Scope = None,
    count: Count = 10,
) -> None:
    """Show the tips that would be found for a state, by the settings of the run that the memory lies in."""
    with reading(memory) as db:
        chosen = chosen_scopes(db, scope)
        if not chosen:
            _print("no tips yet")
            return
        name, dimension = embedder_of(db)
        embedder = SentenceEmbedder(name)
        if embedder.dimension != dimension:
            changed = f"keys have {dimension} dimensions, those of {name!r} now have {embedder.dimension}"
            raise ConfigError(f"{memory}: its {changed}; export it and import it into a new file")
        key, own = embedder.embed([text])[0], _settings_of(memory)
        defaults = load_settings(layer={"memory": own}).memory
        choice = own | {"retrieval": policy or defaults.retrieval, "top_k": count, "exploration": 0.0}
        choice["candidates"] = max(count, defaults.candidates)
        found = find_tips(db, chosen, key, retrieval_policy(load_settings(layer={"memory": choice})))
        nearest = find_tips(db, chosen, key, BySimilarity(1, -math.inf))
    if found:
        _print(tips_table([tip for tip, _ in found], [similarity for _, similarity in found]))
    elif nearest:
        ((tip, cosine),) = nearest
        _print(f"no tip has a cosine above {defaults.min_similarity}; the highest is {cosine:.2f}:")
        _print(tips_table([tip], [cosine]))
    else:
        _print("no tips yet")


def _settings_of(memory: Path) -> dict[str, Any]:
    """Return the section ``memory`` of the run whose memory, or checkpoint's, this is; empty for any other file."""
    folder = memory.absolute().parent
    files = [folder / CONFIG_FILE, *([run_of(folder) / CONFIG_FILE] if is_complete(folder) else [])]
    found = next((yaml.safe_load(file.read_text()).get("memory", {}) for file in files if file.is_file()), {})
    return {key: found[key] for key in load_settings().to_dict()["memory"].keys() & found.keys()}


def _changed(memory: Path) -> None:
    """Let a checkpoint be complete with the memory that was changed, and say where a change has no effect."""
    folder = memory.absolute().parent
    if is_complete(folder):
        mark_complete(folder)
    elif last := last_checkpoint(folder / CHECKPOINTS):
        _print(f"note: if the run is continued, it takes the memory of {last}; change that one", soft_wrap=True)


@app.command(epilog=_example("stats runs/demo"))
@one_line_errors()
def stats(memory: Memory, scope: Scope = None) -> None:
    """Show sizes, hit rates, returns and learned values."""
    with reading(memory) as db:
        chosen = chosen_scopes(db, scope)
        name, dimension = embedder_of(db)
        counts, played = scope_counts(db, chosen), plays(db, chosen)
        tips = stored_tips(db, chosen, order="newest")
    log = memory.with_name(memory.name + "-wal")
    size = memory.stat().st_size + (log.stat().st_size if log.exists() else 0)
    _print(f"{memory}: {size / 1e6:,.1f} MB, keys of {name} ({dimension} dimensions)\n", soft_wrap=True)
    _print(scopes_table(counts))
    if played:
        _print()
        _print(returns_table(played))
    if tips:
        unseen = sum(tip.shown == 0 for tip in tips)
        quantiles = np.quantile([tip.value for tip in tips], [0, 0.25, 0.5, 0.75, 1])
        least, *quartiles, most = (f"{quantile:.2f}" for quantile in quantiles)
        _print(f"\nQ of {len(tips):,} tips: least {least}, quartiles {' '.join(quartiles)}, most {most}")
        _print(f"never shown: {unseen:,} of {len(tips):,} tips ({unseen / len(tips):.0%})")


@app.command(epilog=_example("export runs/demo --output tips.jsonl"))
@one_line_errors()
def export(
    memory: Memory,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="A new file.  [default: standard output]")] = None,
) -> None:
    """Write tips, states and plays as JSON lines."""
    with reading(memory) as db:
        lines = (printable_json(json.dumps(record, ensure_ascii=False)) + "\n" for record in export_records(db))
        if output is None:
            sys.stdout.writelines(lines)
            sys.stdout.flush()
            return
        if output.exists():
            raise ConfigError(f"--output {output}: exists already; give a new file")
        if not output.parent.is_dir():
            raise ConfigError(f"--output {output}: there is no folder {output.parent}")
        unfinished = output.with_name(output.name + ".tmp")
        try:
            unfinished.touch(0o600)  # tips are for their owner only
            with unfinished.open("w", encoding="utf-8") as file:
                file.writelines(lines)
            unfinished.rename(output)
        finally:
            unfinished.unlink(missing_ok=True)


@app.command("import", epilog=_example("import tips.jsonl new.sqlite --embedder all-MiniLM-L6-v2"))
@one_line_errors()
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `empo2 memory export` has written.")],
    memory: Annotated[
        Path,
        typer.Argument(callback=_memory_file, metavar="MEMORY", help="A memory that is not in use, or a new file."),
    ],
    embedder: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="[default: the memory's own; memory.embedder for a new file]"),
    ] = None,
    device: Annotated[str, typer.Option(help="Of the embedder: cpu or cuda.")] = "cpu",
) -> None:
    """Add an export to a memory, or create a new memory from it.

    Every state is embedded again, so a memory can move to another embedder. Tips and plays that the memory already
    has are kept as they are; the visits of states are added up.
    """
    records = read_records(file)
    name = embedder or load_settings().memory.embedder
    if memory.exists() and memory.stat().st_size:
        with reading(memory) as db:
            own, dimension = embedder_of(db)
        if embedder is not None and embedder_name(embedder) != own:
            raise ConfigError(f"--embedder {embedder}: {memory} has keys of {own!r}; give a new file")
        name = own
        # Refuses a memory that is in use before many seconds are spent on loading the model.
        MemoryStore(memory, embedder=own, dimension=dimension).close()
    elif not memory.parent.is_dir():
        raise ConfigError(f"{memory}: there is no folder {memory.parent}")
    progress = partial(track, description="embedding", console=Console(stderr=True))
    tips, played = import_records(memory, records, SentenceEmbedder(name, device=device), progress)
    _print(
        f"{memory}: {tips:,} tips added ({len(records.tips) - tips:,} known), "
        f"visits of {len(records.states):,} states, {played:,} plays ({len(records.plays) - played:,} known)",
        soft_wrap=True,
    )
    _changed(memory)


@app.command(epilog=_example("prune runs/demo --never-shown --older-than 7d --yes"))
@one_line_errors()
def prune(
    memory: Memory,
    scope: Scope = None,
    score_below: Annotated[float | None, typer.Option(metavar="X", help="The score of the tip's episode.")] = None,
    value_below: Annotated[float | None, typer.Option(metavar="X", help="The tip's learned value Q.")] = None,
    never_shown: Annotated[bool, typer.Option("--never-shown", help="In no episode.")] = False,
    older_than: Annotated[
        int | None, typer.Option(parser=_age, metavar="AGE", help="Such as 30m, 12h, 7d or 2w.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; no run may be using the memory.")] = False,
) -> None:
    """Remove the tips that meet all given conditions; without --yes, only show them."""
    if score_below is value_below is older_than is None and not never_shown:
        raise ConfigError("prune: give at least one of --score-below, --value-below, --never-shown and --older-than")
    oldest = time.time() - (older_than or 0)
    with reading(memory) as db:
        stored = stored_tips(db, chosen_scopes(db, scope), order="best")
        embedder, dimension = embedder_of(db)
    tips = [
        tip
        for tip in stored
        if (score_below is None or tip.score < score_below)
        and (value_below is None or tip.value < value_below)
        and (older_than is None or tip.created < oldest)
        and not (never_shown and tip.shown)
    ]
    if yes:
        with closing(MemoryStore(memory, embedder=embedder, dimension=dimension)) as store:
            removed = store.remove_tips([tip.id for tip in tips])
        _print(f"{removed:,} of {len(stored):,} tips removed")
        _changed(memory)
        return
    _print(f"{len(tips):,} of {len(stored):,} tips would be removed; nothing is, without --yes")
    if tips:
        _print(f"\nthe {min(10, len(tips))} best of them:\n")
        _print(tips_table(tips[:10]))


def chosen_scopes(db: sqlite3.Connection, asked: str | None) -> list[str]:
    """Return the scopes with the requested fields, or the scope with exactly this text; a ConfigError for none."""
    there = scopes(db)
    if asked is None:
        return there
    if same := [scope for scope in there if asked in (scope, scope_text(scope))]:
        return same
    parts = (part.partition("=") for part in asked.split(","))
    fields = scope_fields(asked) or {name: value for name, equals, value in parts if equals}
    matching = [scope for scope in there if fields and fields.items() <= scope_fields(scope).items()]
    if not matching:
        names = [scope_text(scope) for scope in there]
        nearest = difflib.get_close_matches(scope_text(asked), names, 1, cutoff=0)
        hint = f"the nearest is {nearest[0]}" if nearest else "the memory is empty"
        raise ConfigError(f"--scope {asked}: there is no such scope; {hint}")
    return matching
