"""Hooks of the site, named in mkdocs.yml: pages from other folders, and examples of docstrings."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Pages of the site that are not in docs/, by their path in the repository.
ELSEWHERE = (
    "CONTRIBUTING.md",
    "benchmarks/RESULTS.md",
    "benchmarks/SCALING.md",
    "benchmarks/results.svg",
)
HIDDEN = re.compile(r"^<!-- (setup|check|not run):.*?-->\n", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from other folders."""
    root = Path(config.config_file_path).parent
    for name in ELSEWHERE:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Removes comments that only the tests read, and adapts links to and from the added pages."""
    del page, config, files
    return re.sub(
        r"\]\((?:\.\./(?=benchmarks/|CONTRIBUTING)|docs/)", "](", HIDDEN.sub("", markdown)
    )


class Documented(griffe.Extension):
    """Shows `Example:` sections as code, and keywords that a signature takes as `Unpack[...]`."""

    def on_instance(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Changes the heading in a docstring; mkdocstrings only supports `Examples:`."""
        del rest
        if obj.docstring is not None:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join("Examples:" if x == "Example:" else x for x in lines)

    def on_function(self, *, func: griffe.Function, **rest: Any) -> None:
        """Lists the keywords as `help` does, where the docstring describes each of them."""
        del rest
        packed = next((p for p in func.parameters if "Unpack[" in str(p.annotation)), None)
        if packed is None or not func.docstring or f"**{packed.name}:" in func.docstring.value:
            return
        given = {parameter.name for parameter in func.parameters}
        function: Any = importlib.import_module(func.module.path)
        for name in func.path.removeprefix(f"{func.module.path}.").split("."):
            function = getattr(function, name)
        del func.parameters[packed.name]
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in given:
                func.parameters.add(
                    griffe.Parameter(
                        name,
                        annotation=str(parameter.annotation),
                        kind=griffe.ParameterKind.keyword_only,
                        default=repr(parameter.default),
                    )
                )
