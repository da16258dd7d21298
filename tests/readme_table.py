"""The README's table of variables, made from the settings: `python -m tests.readme_table` writes it."""

from pathlib import Path

from inference_worker.config.settings import Variable, describe

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- variables: made by `python -m tests.readme_table` -->\n"
END = "<!-- end of variables -->"


def table() -> str:
    """All variables, in Markdown."""
    head = "| variable | default | meaning | accepted |\n| --- | --- | --- | --- |\n"
    return head + "".join(f"{_row(variable)}\n" for variable in describe())


def written(readme: str) -> str:
    """The README with its table as it should be."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md must have the lines {BEGIN.strip()} and {END}")
    return f"{before}{begin}\n{table()}\n{end}{after}"


def _row(variable: Variable) -> str:
    name = f"`{variable.name}`" + ("\u00a0†" if variable.file else "")
    default = {"required": "**required**", "": "–"}.get(variable.default, f"`{variable.default}`")
    cells = (name, default, variable.meaning, variable.accepted)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
