"""Find the packages: a folder at the top with a py.typed is `empo2.FOLDER`, with all packages in it.

All else is in pyproject.toml, whose own discovery knows a package only by the name of its folder.
"""

from pathlib import Path

from setuptools import find_packages, setup

folders = {f"empo2.{file.parent.name}": file.parent.name for file in Path().glob("*/py.typed")}
inside = [f"{name}.{package}" for name, folder in folders.items() for package in find_packages(folder)]
setup(package_dir=folders, packages=[*folders, *inside])
