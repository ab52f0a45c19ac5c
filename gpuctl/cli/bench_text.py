"""What a bench looks like as text: the growing table, CSV, the matrix, the plot, the judgements. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuctl.cli.render import bytes_text

if TYPE_CHECKING:
    from gpuctl.collectives.verdict import Comparison, SlowLink, Verdict
    from gpuctl.services.bench import BenchReport

Row = Mapping[str, Any]

_COLUMNS = {
    "collective": 14,
    "size": 10,
    "count": 12,
    "median us": 11,
    "p95 us": 11,
    "algbw GB/s": 10,
    "busbw GB/s": 10,
    "wrong": 6,
}
_MORE = {"group": 6, "model us": 11, "torch us": 11}
CSV_COLUMNS = (
    "collective", "size_bytes", "count", "dtype", "op", "root", "num_ranks", "group", "algo", "engine",
    "mean_us", "min_us", "median_us", "p95_us", "max_us", "host_us", "torch_us", "model_us", "cv",
    "slowest_rank", "algbw_gb_s", "busbw_gb_s", "wrong", "checked", "iters", "warmup_iters",
)  # fmt: skip
BAR = 40


class Table:
    """The table that grows: which columns there are is known before the first row."""

    def __init__(self, *, has_groups: bool, has_model: bool, has_torch: bool) -> None:
        wanted = {"group": has_groups, "model us": has_model, "torch us": has_torch}
        self._widths = {**_COLUMNS, **{name: _MORE[name] for name, shown in wanted.items() if shown}}

    def head(self) -> str:
        """Return the names of the columns."""
        return "  ".join(f"{name:>{width}}" for name, width in self._widths.items())

    def line(self, row: Row) -> str:
        """Return a row."""
        times = row["time_us"]
        cells = {
            "collective": row["collective"],
            "size": bytes_text(row["size_bytes"]),
            "count": row["count"],
            "median us": f"{times['median']:.1f}",
            "p95 us": f"{times['p95']:.1f}",
            "algbw GB/s": rate_text(row["algbw_gb_s"]),
            "busbw GB/s": rate_text(row["busbw_gb_s"]),
            "wrong": row["wrong"] if row["checked"] else "n/a",
            "group": row["group"],
            "model us": us_text(row["model_us"]),
            "torch us": us_text(row["torch_us"]),
        }
        return "  ".join(f"{cells[name]!s:>{width}}" for name, width in self._widths.items())


def rate_text(gb_s: float | None) -> str:
    """Return a bandwidth; what is small keeps its digits instead of becoming 0.000."""
    if gb_s is None:
        return "-"
    return f"{gb_s:.3f}" if gb_s >= 0.1 or gb_s == 0 else f"{gb_s:.3g}"


def us_text(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:.1f}"


def matrix_lines(row: Row) -> Iterator[str]:
    """Yield a p2p matrix: bandwidth from the rank of the line to the rank of the column."""
    cells = row["bandwidth_gb_s"]
    yield f"p2p, {bytes_text(row['size_bytes'])} messages, GB/s from row to column; {row['wrong']} wrong"
    yield " " * 6 + "".join(f"{rank:>9}" for rank in range(len(cells)))
    for rank, line in enumerate(cells):
        yield f"{rank:>6}" + "".join(f"{rate_text(value):>9}" for value in line)


def plot_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a bar a size for each collective: busbw against the best of its own sweep."""
    shown = [row for row in rows if row.get("busbw_gb_s") is not None]
    for name, group in dict.fromkeys((row["collective"], row["group"]) for row in shown):
        mine = [row for row in shown if (row["collective"], row["group"]) == (name, group)]
        best = max(row["busbw_gb_s"] for row in mine)
        yield ""
        yield f"{name}, busbw GB/s" + ("" if group is None else f", group {group}")
        for row in mine:
            bar = "#" * round(BAR * row["busbw_gb_s"] / best) if best else ""
            yield f"{bytes_text(row['size_bytes']):>10} |{bar:<{BAR}}| {rate_text(row['busbw_gb_s'])}"


def csv_text(rows: Sequence[Row]) -> str:
    """Return one line a row under a header; p2p matrices are left to --json."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if "time_us" in row:
            writer.writerow({**row, **{f"{name}_us": value for name, value in row["time_us"].items()}})
    return out.getvalue().rstrip("\n")


def report_lines(report: BenchReport) -> Iterator[str]:
    """Yield what is said below the table."""
    if report.link is not None:
        yield link_line(report.link)
    yield from (verdict_line(verdict) for verdict in report.verdicts)
    if report.comparisons is not None:
        yield comparison_line(report.comparisons)


def link_line(link: Mapping[str, float]) -> str:
    """Say what the models were fitted from, and where they cross (two ranks: nowhere)."""
    text = f"link: {link['alpha_us']:.0f} us, {rate_text(link['bandwidth_gb_s'])} GB/s"
    if link["crossing_bytes"] >= 1:
        text += f"; by the models the ring wins from {bytes_text(round(link['crossing_bytes']))}"
    return text


def verdict_line(verdict: Verdict) -> str:
    measured = f"{verdict.collective}, {verdict.regime} sizes: {verdict.measured:.3g} {verdict.unit}"
    if verdict.ratio is not None:
        measured += f", {verdict.ratio:.0%} of the {verdict.reference:.3g} that {verdict.source} has"
    return f"{measured}: {verdict.level}" + (f" ({verdict.note})" if verdict.note else "")


def comparison_line(comparisons: Sequence[Comparison]) -> str:
    worse = sum(c.is_regression for c in comparisons)
    return f"compared {len(comparisons)} rows with the saved run: {worse} slower beyond noise"


def warning_lines(report: BenchReport) -> Iterator[str]:
    """Yield what goes to stderr as warnings."""
    yield from report.warnings
    yield from (slow_link_line(link) for link in report.slow_links)
    for c in report.regressions:
        yield (
            f"{c.collective} of {bytes_text(c.size_bytes)}: {c.slowdown:+.0%} "
            f"({c.before_us:.1f} -> {c.now_us:.1f} us, noise {c.noise:.0%})"
        )


def slow_link_line(link: SlowLink) -> str:
    """Name who is slow: a rank whose links all are, or one pair."""
    who = (
        f"the links of rank {link.ranks[0]}"
        if len(link.ranks) == 1
        else f"rank {link.ranks[0]} -> rank {link.ranks[1]}"
    )
    host = f" ({link.host})" if link.host else ""
    return (
        f"{who}{host}: {rate_text(link.bandwidth_gb_s)} GB/s, the median link {rate_text(link.median_gb_s)}"
    )
