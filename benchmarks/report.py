#!/usr/bin/env python3
"""Tables and plots of benchmarks/results/*.json.

    report.py            write the tables into README.md, and plots as SVG and PNG
    report.py --tables   the tables only (needs no matplotlib)
    report.py --check    change nothing; exit 1 where README.md differs from what would be written

A table stands in README.md between <!-- table:NAME --> and <!-- end -->. NAME is a results file
without .json, or a benchmark (drafters, overhead, stress, first_step, kernels), which is all files
of it together. Plots go beside the results: drafters NAME.svg, and stress.svg and overhead.svg.

Exit code: 0 done, 1 --check found a difference, 2 something is missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import benchlib
import overhead

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table:([\w.-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class Missing(Exception):
    """A table or result that is asked for and not there."""


Result = dict[str, Any]


def load(folder: Path) -> dict[str, Result]:
    """The results in ``folder`` by file name without .json, in order of name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except ValueError as e:
            raise Missing(f"{path.name} is not JSON: {e}") from None
        if isinstance(data, dict) and "benchmark" in data:
            found[path.stem] = data
    return found


# --- tables -----------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns after the first that hold only figures are right-aligned."""

    def figures(column: int) -> bool:
        cells = [row[column] for row in rows]
        return column > 0 and all(re.fullmatch(r"[-+≤≥]?[\d.,\s/→µmsn]*", c) for c in cells)

    rule = ["---:" if figures(i) else "---" for i in range(len(header))]
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def caption(*results: Result) -> str:
    """Where, with what, when and by which commands results were measured, in one line."""
    places, versions, dates, commands = ({} for _ in range(4))
    for r in results:
        torch = r.get("torch")
        facts = list(torch.values()) if isinstance(torch, dict) else [r]
        facts += [arm for pair in r.get("pairs", []) for arm in (pair["stock"], pair["patched"])]
        gpus = next((f["gpus"] for f in facts if f.get("gpus")), [])
        where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{r['machine']}, {r['cores']} cores"
        places[where] = versions[f"Python {r['python']}"] = dates[r["date"].split()[0]] = None
        found = [f["torch"] for f in facts if isinstance(f.get("torch"), str)]
        versions.update((f"torch {v}", None) for v in found)
        commands[f"`{r['command']}`"] = None
    return "; ".join([*places, *sorted(versions), *dates, *commands]) + "\n"


def stress_table(results: Sequence[Result]) -> str:
    rows = []
    for r in sorted(results, key=stress_order):
        done = f"{r['done']:,}" + (
            "" if r["done"] == r["operations"] else f" of {r['operations']:,}"
        )
        left = f"{len(r['leaks'])}" if "leaks" in r else "-"
        how = "cold" if r.get("cold") else ""
        rows.append([
            r["torch"], "patched" if r["patched"] else "stock",
            " ".join(filter(None, [r["device"], how])), str(r["threads"]), done,
            f"{r['wrong']:,}", left, {"passed": "", "failed": ""}.get(r["outcome"], r["outcome"]),
        ])  # fmt: skip
    header = ("torch", "", "device", "threads", "operations", "wrong", "left behind", "")
    return markdown(header, rows) + "\n" + caption(*results)


def stress_order(result: Result) -> tuple[Any, ...]:
    return [int(n) for n in re.findall(r"\d+", result["torch"])[:3]], result["patched"]


def overhead_table(results: Sequence[Result]) -> str:
    pairs = [p for r in results for p in r["pairs"]]
    pairs.sort(key=lambda p: [int(n) for n in re.findall(r"\d+", p["stock"]["torch"])[:3]])
    rows: dict[str, list[str]] = {}
    for i, pair in enumerate(pairs):
        for b in pair["benchmarks"]:
            cell = f"{b['ratio']:.2f} ({micro(b['stock_seconds'])} → {micro(b['patched_seconds'])})"
            rows.setdefault(b["name"], ["-"] * len(pairs))[i] = verdict(cell, b)
        for e in pair["trace_elsewhere"]:
            cell = "raises" if e["failure"] else f"+{micro(e['extra_seconds'])}"
            rows.setdefault(e["name"], ["-"] * len(pairs))[i] = verdict(cell, e)
    header = ["patched / stock", *(p["stock"]["torch"].split("+")[0] for p in pairs)]
    return (
        markdown(header, [[name, *cells] for name, cells in rows.items()])
        + "\n"
        + caption(*results)
    )


def verdict(cell: str, measured: Result) -> str:
    if measured["holds"] is not False:
        return cell
    limit = measured["limit"]
    return f"{cell}, limit {micro(limit) if limit < 1e-3 else format(limit, '.2f')}"


def micro(seconds: float) -> str:
    return overhead.readable(seconds).replace("us", "µs")


def drafters_table(results: Sequence[Result]) -> str:
    tables = []
    for r in results:
        rows = []
        for name, arm in r["arms"].items():
            kernels = [d["kernels"] for d in arm["drafters"] if d["kernels"]]
            proof = "-"
            if kernels:
                proof = "yes" if all(k["full_speed"] for k in kernels) else "no"
            rows.append([
                name,
                ", ".join(f"{n} {o}" for o, n in arm["outcomes"].items()),
                " / ".join(f"{d['ktok_s']:.1f}" for d in arm["drafters"]) or "-",
                figure(arm["ktok_s"]), figure(arm["first_step_s"]),
                figure(arm["peak_memory_bytes"] and arm["peak_memory_bytes"] / 2**30), proof,
            ])  # fmt: skip
        header = ("arm", "outcome", "Ktok/s, each drafter", "in all", "first step, s",
                  "memory, GiB", "kernels at full speed")  # fmt: skip
        checks = "".join(
            f"- {c['name']}: "
            + ("" if c["value"] is None else f"{c['value']:.3f} ({c['limit']}) ")
            + ("holds\n" if c["holds"] else "missed\n")
            for c in r["checks"]
        )
        about = f"Preset `{r['preset']}`, drafters on {r['devices']}, "
        about += f"targets on {targets}, " if (targets := r.get("targets")) else ""
        about += f"{r['steps']} steps"
        about += f", `{options}`. " if (options := r.get("train_options")) else ". "
        tables.append(markdown(header, rows) + "\n" + checks + "\n" * bool(checks) + about
                      + caption(r))  # fmt: skip
    return "\n".join(tables)


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def kernels_table(results: Sequence[Result]) -> str:
    rows = []
    for r in results:
        for name, arm in r["arms"].items():
            for i, d in enumerate(arm["drafters"]):
                if k := d["kernels"]:
                    slower = ", ".join(f"{n} {v:.2f} times" for n, v in k["slower"].items())
                    rows.append([
                        ", ".join(filter(None, [
                            r["preset"], name, f"drafter {i}", r.get("train_options")
                        ])), f"{k['forward_us']:.0f}",
                        f"{k['backward_us']:.0f}", f"{k['all_us']:.0f}",
                        ", ".join(k["unfused"]) or "none", slower or "none",
                        "yes" if k["full_speed"] else "no",
                    ])  # fmt: skip
    header = ("a steady step", "flex_attention forward, µs", "backward, µs", "all kernels, µs",
              "unfused attention", "5 % slower than alone", "full speed")  # fmt: skip
    return markdown(header, rows) + "\n" + caption(*results)


def first_step_table(results: Sequence[Result]) -> str:
    rows = []
    for r in results:
        for s in r["summary"]:
            rows.append([
                ", ".join(dict.fromkeys(s["devices"])), str(len(s["devices"])), s["arm"],
                s["code"], s["caches"],
                ", ".join(f"{n} {o}" for o, n in s["outcomes"].items()),
                figure(s["first_step_s"]),
                "-" if s["to_one_alone"] is None else f"{s['to_one_alone']:.2f}",
                "-" if s["to_processes"] is None else f"{s['to_processes']:.2f}",
            ])  # fmt: skip
    header = ("devices", "workers", "arm", "code", "caches", "outcome", "first step, s",
              "to one alone", "to processes")  # fmt: skip
    return markdown(header, rows) + "\n" + caption(*results)


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "stress": stress_table,
    "overhead": overhead_table,
    "drafters": drafters_table,
    "kernels": kernels_table,
    "first_step": first_step_table,
}


def table(name: str, results: dict[str, Result]) -> str:
    """The table that the marker ``table:NAME`` asks for; Missing where there are no results."""
    if name in results:
        found = [results[name]]
        kind = found[0]["benchmark"]
    else:
        kind = name
        wanted = "drafters" if kind == "kernels" else kind
        found = [r for r in results.values() if r["benchmark"] == wanted]
    if kind not in TABLES or not found:
        raise Missing(f"table:{name}: no results for it in benchmarks/results")
    return TABLES[kind](found)


def filled(text: str, results: dict[str, Result]) -> str:
    """``text`` with each marked table as the results have it."""
    opened = len(re.findall(r"<!-- table:", text))
    if opened != len(MARKED.findall(text)):
        raise Missing("a <!-- table:NAME --> line without its <!-- end -->")
    return MARKED.sub(lambda m: f"{m[1]}\n{table(m[2], results)}\n{m[4]}", text)


# --- plots ------------------------------------------------------------------------------------

INK, GRID = "#22252a", "#d9dce1"
COLOURS = ["#2f6db3", "#e08a2c", "#3f9e6e", "#8a63b8", "#c2504d", "#5b7f95"]
STOCK, PATCHED = "#b9bec6", "#2f6db3"


def plt() -> Any:
    """matplotlib's pyplot, set up; Missing where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise Missing("plots need matplotlib: pip install matplotlib, or --tables") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    pyplot.rcParams.update({
        "font.size": 10, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation":
        "left", "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK, "xtick.color":
        INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
        "svg.hashsalt": "fx", "svg.fonttype": "none", "figure.dpi": 100,
    })  # fmt: skip
    return pyplot


def save(figure_: Any, path: Path) -> list[Path]:
    """Write ``path``.svg and ``path``.png."""
    written = []
    for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 150})):
        target = path.with_name(path.name + suffix)
        figure_.savefig(target, bbox_inches="tight", **options)
        written.append(target)
    return written


def plot_drafters(result: Result, path: Path) -> list[Path]:
    """Throughput by arm: a bar a drafter, its repetitions as dots, the ideal as a line."""
    pyplot = plt()
    arms = {n: a for n, a in result["arms"].items() if n != "reference"}
    count = max([len(a["drafters"]) for a in arms.values()] + [1])
    figure_, axes = pyplot.subplots(figsize=(max(8.0, 1.9 * len(arms) + 1.5), 4.2))
    width = 0.78 / count
    ideal = arms.get("processes", {}).get("drafters", [])
    for x, arm in enumerate(arms.values()):
        for i, d in enumerate(arm["drafters"]):
            at = x + (i - (count - 1) / 2) * width
            axes.bar(at, d["ktok_s"], width * 0.92, color=COLOURS[i % len(COLOURS)])
            every = d["ktok_s_all"]
            axes.plot([at] * len(every), every, "o", color=INK, markersize=3, alpha=0.6)
            axes.annotate(f"{d['ktok_s']:.3g}", (at, d["ktok_s"] / 2), ha="center", va="center",
                          color="white", fontweight="bold")  # fmt: skip
        failed = ", ".join(o for o in arm["outcomes"] if o != "trained")
        if failed:
            axes.annotate(failed, (x, 0), xytext=(0, 6), textcoords="offset points", ha="center",
                          color="#c2504d", fontweight="bold")  # fmt: skip
    handles = [
        pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[i % len(COLOURS)]) for i in range(count)
    ]
    names = [f"drafter {i}" for i in range(count)]
    if ideal:
        level = sum(d["ktok_s"] for d in ideal) / len(ideal)
        handles.append(axes.axhline(level, color=INK, linewidth=1.2, linestyle=(0, (5, 3))))
        names.append("ideal: a process for each drafter")
    axes.set_xticks(range(len(arms)), [n.replace("-", "\n", 1) for n in arms])
    axes.set_ylabel("Ktok/s of each drafter")
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.14)
    devices = next(iter(result["torch"].values()))
    where = f"{len(devices['gpus'])} x {devices['gpus'][0]}" if devices["gpus"] else "CPU"
    axes.set_title(
        f"DFlash drafters, {result['preset']}, {where}, torch {devices['torch']}", pad=14
    )
    axes.set_xlim(-0.6, len(arms) - 0.4)
    axes.legend(handles, names, frameon=False, ncols=len(names), loc="upper center",
                bbox_to_anchor=(0.5, -0.16))  # fmt: skip
    written = save(figure_, path)
    pyplot.close(figure_)
    return written


def plot_overhead(results: Sequence[Result], path: Path) -> list[Path]:
    """Ratio patched / stock of each benchmark, a dot a release, quartiles as whiskers."""
    pyplot = plt()
    pairs = [p for r in results for p in r["pairs"]]
    pairs.sort(key=lambda p: [int(n) for n in re.findall(r"\d+", p["stock"]["torch"])[:3]])
    names = list(dict.fromkeys(b["name"] for p in pairs for b in p["benchmarks"]))
    figure_, axes = pyplot.subplots(figsize=(8.5, 0.42 * len(names) + 1.6))
    step = 0.6 / max(1, len(pairs))
    for i, pair in enumerate(pairs):
        shift = (i - (len(pairs) - 1) / 2) * step
        rows = {b["name"]: b for b in pair["benchmarks"]}
        ys = [names.index(n) + shift for n in rows]
        ratios = [b["ratio"] for b in rows.values()]
        spread = [
            [max(0.0, b["ratio"] - b["ratio_quartiles"][0]) for b in rows.values()],
            [max(0.0, b["ratio_quartiles"][1] - b["ratio"]) for b in rows.values()],
        ]
        axes.errorbar(ratios, ys, xerr=spread, fmt="o", markersize=5, capsize=2, linewidth=1.2,
                      color=COLOURS[i % len(COLOURS)],
                      label=pair["stock"]["torch"].split("+")[0])  # fmt: skip
        for b, y in zip(rows.values(), ys, strict=True):
            if b["limit"] is not None:
                axes.plot([b["limit"]], [y], "|", color="#c2504d", markersize=9, markeredgewidth=2)
    axes.plot([], [], "|", color="#c2504d", markersize=9, markeredgewidth=2, label="limit")
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("time patched / time stock")
    axes.set_title("What the patches cost and save", pad=12)
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, loc="lower left")
    written = save(figure_, path)
    pyplot.close(figure_)
    return written


def plot_stress(results: Sequence[Result], path: Path) -> list[Path]:
    """Share of operations that went wrong, stock beside patched, by release."""
    pyplot = plt()
    ordered = sorted(results, key=stress_order)
    releases = list(dict.fromkeys(r["torch"].split("+")[0] for r in ordered))
    figure_, axes = pyplot.subplots(figsize=(1.7 * len(releases) + 3, 3.8))
    for patched, colour in ((False, STOCK), (True, PATCHED)):
        label = "patched" if patched else "stock"
        for x, release in enumerate(releases):
            mine = [r for r in ordered if r["patched"] == patched
                    and r["torch"].split("+")[0] == release]  # fmt: skip
            if not mine:
                continue
            done, wrong = sum(r["done"] for r in mine), sum(r["wrong"] for r in mine)
            at, share = x + (0.2 if patched else -0.2), 100 * wrong / max(1, done)
            axes.bar(at, share, 0.36, color=colour, label=label)
            label = "_"
            ends = {"died": "crashed", "hung": "hung"}
            ended = [ends[r["outcome"]] for r in mine if r["outcome"] in ends]
            text = "\n".join([f"{wrong:,} of", f"{done:,}", *dict.fromkeys(ended)])
            axes.annotate(text, (at, share), xytext=(0, 3), textcoords="offset points",
                          ha="center", fontsize=9)  # fmt: skip
    axes.set_xticks(range(len(releases)), [f"torch {r}" for r in releases])
    axes.set_ylabel("operations wrong, %")
    axes.set_xlim(-0.6, len(releases) - 0.4)
    axes.set_ylim(0, 125)
    axes.set_yticks(range(0, 101, 25))
    axes.grid(axis="x", visible=False)
    threads = sorted({r["threads"] for r in ordered})
    axes.set_title(f"Mixed operations on {'/'.join(map(str, threads))} threads", pad=12)
    axes.legend(frameon=False, loc="upper right", ncols=2)
    written = save(figure_, path)
    pyplot.close(figure_)
    return written


def plots(results: dict[str, Result], folder: Path) -> list[Path]:
    """Write every plot that the results allow."""
    written = []
    for name, r in results.items():
        if r["benchmark"] == "drafters" and set(r["arms"]) != {"reference"}:
            written += plot_drafters(r, folder / name)
    for kind, plot in (("overhead", plot_overhead), ("stress", plot_stress)):
        found = [r for r in results.values() if r["benchmark"] == kind]
        if found:
            written += plot(found, folder / kind)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = benchlib.Parser("report.py", __doc__)
    parser.add_argument("--tables", action="store_true", help="write no plots")
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    args = parser.parse_args(argv)
    try:
        results = load(args.results)
        text = args.readme.read_text()
        new = filled(text, results)
        if args.check:
            if new != text:
                print(f"report.py: {args.readme.name} is not what benchmarks/results say; run "
                      "benchmarks/report.py --tables", file=sys.stderr)  # fmt: skip
            return int(new != text)
        if new != text:
            args.readme.write_text(new)
        print(f"{args.readme.name}: {len(MARKED.findall(new))} tables")
        if not args.tables:
            for path in plots(results, args.results):
                print(path.name)
    except (Missing, OSError) as e:
        print(f"report.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
