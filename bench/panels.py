"""Write the panels of recipe/evaluation/panels/ anew from the worlds' own task functions, as panels.yaml says.

    .venv/bin/python bench/panels.py [NAME ...]

Equal versions of the worlds give equal files. WebShop's rows name their catalogue's folder by a plain name, which
``--row catalogue=FOLDER`` replaces, and ALFWorld's their file ``alfworld.zip``, from which they are also made.
"""

import argparse
import json

from empo2.recipe.config import imported, lay_over, read_layer
from empo2.recipe.evaluation.panels import FOLDER

PANELS = read_layer(FOLDER / "panels.yaml")["panels"]
_ROOT = FOLDER.parents[2]
_SECTIONS = ("algorithm", "agent", "memory", "reflection")  # of a world's own settings


def text_of(name: str) -> str:
    """Return a panel's file: JSON with a row a line, and what all rows share written once."""
    panel = PANELS[name]
    rows = imported(panel["source"], "source")(**panel["args"])[panel["part"]]
    rows = [row | panel.get("row", {}) for row in rows]
    common = {field: value for field, value in rows[0].items() if all(row[field] == value for row in rows)}
    settings = read_layer(_ROOT / panel["settings"]) if "settings" in panel else {}
    config = lay_over({section: settings[section] for section in _SECTIONS if section in settings}, panel["config"])
    head = {"description": panel["description"], "group": panel["group"], "config": config, "common": common}
    different = ({field: value for field, value in row.items() if field not in common} for row in rows)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in different)
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'


def main() -> None:
    """Write the panels that the command line names, or all."""
    parser = argparse.ArgumentParser(description="Write the panels anew from the worlds' own task functions.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PANELS)}; all by default")
    names = parser.parse_args().names or list(PANELS)
    if unknown := set(names) - set(PANELS):
        parser.error(f"there is no panel {', '.join(sorted(unknown))}")
    for name in names:
        (FOLDER / f"{name}.json").write_text(text_of(name))
        print(FOLDER / f"{name}.json")


if __name__ == "__main__":
    main()
