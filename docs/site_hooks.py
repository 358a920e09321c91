"""What the site does with the pages beside rendering them; named in mkdocs.yml."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# These lie beside the code that writes them, and are pages of the site, too.
BENCHMARKS = ("RESULTS.md", "SCALING.md", "results.svg")
HIDDEN = re.compile(r"^<!-- (setup|check|not run):.*?-->\n", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what the benchmarks have found."""
    there = Path(config.config_file_path).parent / "benchmarks"
    for name in BENCHMARKS:
        source = str(there / name)
        files.append(File.generated(config, f"benchmarks/{name}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Takes out what only the tests of the pages read, and leads to the pages added above."""
    del page, config, files
    return HIDDEN.sub("", markdown).replace("](../benchmarks/", "](benchmarks/")


class Examples(griffe.Extension):
    """Shows the examples of docstrings as code; mkdocstrings knows only the plural."""

    def on_instance(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Changes the heading in one docstring."""
        del rest
        if obj.docstring is not None:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join("Examples:" if x == "Example:" else x for x in lines)
