"""The page: what is on it, that it is safe and self-contained, and that a browser runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from loka_compile.cli import app
from loka_compile.errors import ReportFileError
from loka_compile.mod_set import ON
from loka_compile.mods import Decision
from loka_compile.options import Environment
from loka_compile.passes.records import Note
from loka_compile.passes.records import PassRecord
from loka_compile.report.collect import GraphReport
from loka_compile.report.explain import Report
from loka_compile.report.saved import load

EVIL = "<script>alert(1)</script>&\"'{{ 7*7 }}"
BASE = {"kernel": "high_precision", "mere": None, "mere_clamped": None, "bad_rows": None}
HIGH = {**BASE, "us": None, "speedup": None, "source": "", "reason": "a head stays high"}
FP8 = {**BASE, "kernel": "torch:rowwise+emulated", "mere": 0.25, "mere_clamped": 0.0625}
FP8 |= {"bad_rows": 0.005, "us": None, "speedup": None, "source": "emulated", "reason": ""}
TEXT = "".join(f"line_{i} = f({i})\n" for i in range(60))
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def site(name, choice, **other):
    row = {"name": name, "M": 64, "K": 32, "N": 16, "dtype": "float32", "count": 1, "fused": None}
    return {**row, **other, "directions": dict.fromkeys(("fwd", "dgrad", "wgrad"), choice)}


def replay():
    changed = TEXT.replace("f(30)", f"g(30)  # {EVIL}")
    return [
        PassRecord("strip_bias", before=TEXT, after=changed),
        PassRecord("hard_swish", before=changed, after=changed),
    ]


def report_of(sites=None, graphs=1):
    strip = PassRecord("strip_bias", 1.5, 12, 10, changes=[Note("mlp.0", "bias removed", "m.py:7")])
    strip.refusals = [Note(EVIL, "two readers", "model.py:41")]
    fuse = PassRecord("fuse", 2.0, 10, 8, rewrites=[Note("mlp.0", "fused linear + norm")])
    broken = PassRecord("theirs", error="Traceback\nValueError: no\n")
    report = Report()
    for _ in range(graphs):
        one = GraphReport("training graph of 3 linears", [], Environment(False, (), None))
        one.sites = sites or [site("mlp.0", FP8, fused="mlp.0+norm"), site("head", HIGH)]
        if sites is None:
            one.sites.append(site(EVIL, HIGH))
        one.records, one.variants = [strip, fuse, broken], ["mods on, 1 FP8 sites"]
        one.notes, one.mods, one.replay = ["mlp.0: a note"], Decision(ON, "said so"), replay
        report.add(one)
    return report


@pytest.fixture
def page(tmp_path):
    return report_of().save(tmp_path / "r.html").read_text()


class Checker(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.fetched = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        kept = dict(attributes)
        self.fetched += [kept[k] for k in ("src", "srcset", "data") if k in kept]
        self.fetched += [kept["href"]] if not (kept.get("href") or "#").startswith("#") else []

    def handle_data(self, data):
        self.text.append(data)


def test_every_section_is_there_in_order(page):
    checker = Checker(page)
    text = " ".join("".join(checker.text).split())
    said = (
        "loka report",
        "linears found",
        "a head stays high",
        "pass theirs failed and was undone: ValueError: no",
        "FP8 is emulated",
        "Mods on (said so)",
        "GEMM sites",
        "Changed there: bias removed (at m.py:7).",
        "mlp.0: a note.",
        "Error per site",
        "Model changes (Mods: the function is different)",
        "bias removed",
        "Exact rewrites (the same function)",
        "fused linear + norm",
        "Left alone, and why",
        "two readers",
        "model.py:41",
        "Passes",
        "strip_bias",
        "12 → 10",
        "unchanged lines",
        "hard_swish changed nothing",
    )
    at = 0
    for one in said:
        assert one in text[at:], one
        at = text.index(one, at)


def test_names_are_text_never_markup(page):
    checker = Checker(page)
    assert checker.tags.count("script") == 2
    assert "<script>alert" not in page and "{{ 7*7 }}" in page and "49" not in checker.text
    lines = re.search(r'id="lines">(.*?)</script>', page, re.S)
    assert lines is not None and "<" not in lines[1]


def test_nothing_is_fetched_and_nothing_is_repeated(page, tmp_path):
    checker = Checker(page)
    assert not checker.fetched and not re.search(r"https?://|url\(|@import", page)
    assert not {"link", "img", "iframe", "object"} & set(checker.tags)
    assert len(page) < 40_000
    # Shown once: by the first diff's fold.
    assert page.count("line_5 = f(5)") == 1
    twice = report_of(graphs=2).save(tmp_path / "two.html").read_text()
    assert "the same change as in graph 0" in twice and len(twice) < len(page) + 3_000


def test_the_table_sorts_by_what_cells_say_they_are(page):
    heads = re.findall(r'<th(?: class="n")?><button>([^<]+)</button>', page)
    assert ",".join(heads) == "layer,M,K,N,fwd,dgrad,wgrad,error,speedup,why high"
    row = re.search(r'<tr class="row">.*?<tr hidden>', page, re.S)
    assert row is not None and row[0].count("data-v=") == len(heads)
    assert 'data-v="0.0625"' in row[0]


def test_the_first_screen_says_what_changed_where_fp8_runs_and_what_it_gains(tmp_path):
    text = " ".join(
        "".join(Checker(large_report().save(tmp_path / "r.html").read_text()).text).split()
    )
    first = text[: text.index("GEMM sites 60 of 60")].replace("\u00d7", "x")
    for said in (
        "1.50xtimed GEMMs: 122 ms → 81.8 ms",
        "The model's function is different (Mods or patterns): 1 x bias removed",
        "FP8 runs in fwd: 30 of 60 linears, 50 % of FLOPs",
        "In high precision because 30 x not accurate enough",
    ):
        assert said in first, (said, first)
    one = report_of([site("mlp.0", HIGH)])
    for record in one.graphs[0].records:
        record.changes = []
    page = one.save(tmp_path / "r.html").read_text()
    assert "The model's function is as written." in page and "FP8 runs in" not in page


def test_diffs_only_where_wanted(tmp_path):
    assert 'class="diff"' not in report_of().save(tmp_path / "r.html", diffs=False).read_text()
    body = json.loads(report_of().save(tmp_path / "r.json").read_text())
    assert "texts" not in body["graphs"][0]


@pytest.mark.parametrize("diffs", [False, True])
def test_a_saved_report_gives_the_same_text_and_page(tmp_path, diffs):
    report = report_of([site("mlp.0", {**FP8, "mere": float("inf"), "speedup": 1.5, "us": 4.0})])
    report.save(tmp_path / "r.json", diffs=diffs)
    again = load(tmp_path / "r.json")
    report.ran = again.ran
    assert again.text() == report.text() and again.to_dict() == report.to_dict()
    pages = [r.save(tmp_path / "r.html").read_text() for r in (report, again)]
    assert (pages[0] == pages[1]) is diffs
    assert ("texts were not kept" in pages[1]) is not diffs


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "not JSON"),
        ("[]", r"not a report"),
        ('{"kind": "loka-report", "version": 9}', "of version 9"),
        ('{"kind": "loka-report", "version": 1, "torch": "2", "graphs": [{}]}', "damaged"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text, why):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ReportFileError, match=why):
        load(tmp_path / "r.json")


def test_an_empty_report_says_how_to_fill_it(tmp_path):
    assert "No graph was seen" in Report().save(tmp_path / "r.html").read_text()


def test_command_report(tmp_path):
    saved = report_of().save(tmp_path / "r.json")
    got = CliRunner().invoke(app, ["report", str(saved)])
    assert got.exit_code == 0 and got.output == report_of().text()
    got = CliRunner().invoke(app, ["report", str(saved), "--html", str(tmp_path / "o.html")])
    assert got.exit_code == 0 and "GEMM sites" in (tmp_path / "o.html").read_text()
    for name, why in (("absent.json", "No such file"), ("r.json", "end the name in .html")):
        wrong = [str(tmp_path / name), "--html", str(tmp_path / "o.pdf")]
        got = CliRunner().invoke(app, ["report", *wrong])
        assert got.exit_code == 2 and why in got.stderr


SCRIPT = """\
import sys
import torch
import beside
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU())
options = {"inner": "eager", "mods": "on"}
torch.compile(model, backend="loka", options=options)(torch.randn(8, 32)).sum().backward()
assert __name__ == "__main__" and sys.argv[1:] == ["--html", "x"], sys.argv
sys.exit(3)
"""


def test_command_explain_runs_a_script_and_keeps_its_exit_code(tmp_path):
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    argv, out = list(sys.argv), tmp_path / "o.html"
    line = ["explain", "--html", str(out), str(tmp_path / "s.py"), "--", "--html", "x"]
    got = CliRunner().invoke(app, line)
    assert got.exit_code == 3, got.output
    assert "bias removed" in out.read_text() and 'class="diff"' in out.read_text()
    assert sys.argv == argv and str(tmp_path) not in sys.path
    got = CliRunner().invoke(app, ["explain", str(tmp_path / "absent.py")])
    assert got.exit_code == 2 and "no such file" in got.stderr


PROBE = """<script>
document.querySelector("tr.fold button").click();
const head = document.querySelectorAll("#sites-table > thead th")[7].firstElementChild;
head.click();
const search = document.getElementById("search");
search.value = "MLP"; search.dispatchEvent(new Event("input"));
document.querySelector("tr.row").click();
document.title = [
  document.querySelector("tbody.site").dataset.name,
  document.getElementById("found").textContent,
  document.querySelector("tr.row").nextElementSibling.hidden,
  [...document.querySelectorAll(".diff td")].some((c) => c.textContent === "line_5 = f(5)"),
  document.documentElement.scrollWidth <= innerWidth,
].join("|");
</script></body>"""


#: Text on what it stands on, by the names of the style sheet's colours.
TEXT_ON = {
    "bg": ("text", "soft", "accent", "fwd", "dgrad", "wgrad"),
    "panel": ("text", "soft", "good", "bad"),
    "good-bg": ("good",),
    "warn-bg": ("warn",),
    "fold": ("text", "accent", "soft"),
    **dict.fromkeys(("add", "add-mark", "del", "del-mark"), ("text",)),
}


def luminance(colour):
    wide = colour[1:] if len(colour) == 7 else "".join(c + c for c in colour[1:])
    parts = [int(wide[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_on_its_ground(scheme):
    """WCAG 2 asks for a contrast of 4.5."""
    style = (files("loka_compile.report") / "template.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, flags=re.S)
    assert len(blocks) == 2
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", blocks[scheme == "dark"]))
    for ground, texts in TEXT_ON.items():
        for text in texts:
            dark, light = sorted(luminance(colours[c]) for c in (ground, text))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium, chromium-browser or google-chrome here"
)


def chromium(tmp_path, file, *more):
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    flags += "--disable-background-networking --disable-component-update --disable-sync"
    line = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'p'}", *more, file.as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    return title[1] if title else ""


@needs_chromium
def test_a_browser_sorts_searches_expands_and_unfolds(page, tmp_path):
    file = tmp_path / "probe.html"
    file.write_text(page.replace("</body>", PROBE))
    title = chromium(tmp_path, file, "--window-size=1280,800", "--dump-dom")
    assert title == "mlp.0|1 of 3 sites|false|true|true"


TIMER = """<script>addEventListener("load", () => {
document.title = performance.now() < 2000 ? "soon" : "late: " + performance.now();
});</script></body>"""


def large_report():
    """As many sites as Wukong base has, twice, and long reasons."""
    refused = {**HIGH, "us": 10.0, "speedup": 0.9}
    refused["reason"] = "; ".join(f"library_{i}: clamped MERE 0.3 >= 0.2" for i in range(3))
    choices = [refused, {**FP8, "us": 900.0, "speedup": 1.5, "source": "measured"}]
    name = "layers.{}.fmb.mlp.{}"
    return report_of([site(name.format(i, i % 9), choices[i % 2], M=524288) for i in range(60)])


@needs_chromium
def test_a_large_page_opens_at_once_and_prints_on_a_few_sheets(tmp_path):
    file = large_report().save(tmp_path / "large.html")
    sheets = tmp_path / "sheets.pdf"
    chromium(tmp_path, file, f"--print-to-pdf={sheets}")
    # A column without width makes one sheet of every row.
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", sheets.read_bytes())) <= 12
    file.write_text(file.read_text().replace("</body>", TIMER))
    assert chromium(tmp_path, file, "--dump-dom") == "soon"
