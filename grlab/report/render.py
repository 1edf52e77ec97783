"""Blocks of text cells, as plain text of a given width or as Markdown."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Block:
    """A titled grid of cells. The first column names the row and is repeated where a wide block is broken."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def terminal(self, width: int) -> str:
        """Aligned columns, broken into as many parts as `width` asks for."""
        parts = enumerate(self._parts(width))
        return "\n\n".join(self._lines(self.title + " (continued)" * (i > 0), columns) for i, columns in parts)

    def markdown(self) -> str:
        """A Markdown table under its title."""
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"**{self.title}**\n\n{text}"

    def _widths(self) -> list[int]:
        return [max(len(line[i]) for line in (self.header, *self.rows)) for i in range(len(self.header))]

    def _parts(self, width: int) -> Iterator[list[int]]:
        widths, part = self._widths(), [0]
        for i in range(1, len(widths)):
            if len(part) > 1 and sum(widths[j] + 2 for j in part) + widths[i] > width:
                yield part
                part = [0]
            part.append(i)
        yield part

    def _lines(self, title: str, columns: list[int]) -> str:
        widths = self._widths()

        def line(cells: list[str]) -> str:
            first, *others = columns
            return "  ".join([cells[first].ljust(widths[first]), *(cells[i].rjust(widths[i]) for i in others)]).rstrip()

        rule = "-" * (sum(widths[i] + 2 for i in columns) - 2)
        return "\n".join([title, rule, line(self.header), rule, *map(line, self.rows), rule])
