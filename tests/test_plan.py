"""Plan files: round trip, atomic writes, refusals that leave the file alone, merge, lookup."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from loka_compile import plan as plan_module
from loka_compile.errors import PlanFileError
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.mod_set import EVERY
from loka_compile.plan import Choice
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan


def _site(name="arch.0", k=64, n=32, kernel="torch:rowwise") -> SitePlan:
    fwd = Choice(
        kernel=kernel,
        library="torch",
        recipe="rowwise",
        mere=0.31,
        mere_clamped=0.05,
        bad_rows=0.0,
        us=12.5,
        speedup=1.4,
        source="measured",
        reason="",
    )
    return SitePlan(
        name,
        4096,
        k,
        n,
        "bfloat16",
        count=2,
        fused="chain0",
        directions={"fwd": fwd, "dgrad": Choice(reason="speedup 0.9 < 1.05")},
    )


def _plan(*sites: SitePlan, **more) -> Plan:
    return Plan(
        sites={s.name: s for s in sites},
        mods=EVERY,
        parameters=("arch.0.weight", "größe.weight"),
        block=128,
        emulated=True,
        env={"torch": "2.13.0"},
        **more,
    )


def test_round_trip_is_exact(tmp_path):
    plan = _plan(_site(), _site("arch.1#2"))
    path = plan.save(tmp_path / "deep" / "er" / "plan.json")
    assert Plan.load(path) == plan
    assert Plan.load(str(path)).sites["arch.0"].kernels == (
        "torch:rowwise",
        HIGH_PRECISION,
        HIGH_PRECISION,
    )
    assert Plan.from_dict(json.loads(path.read_text())) == plan
    assert not Plan().active and Plan.load(Plan().save(tmp_path / "empty.json")) == Plan()


def test_file_is_readable_json_with_a_kind_and_a_version(tmp_path):
    data = json.loads(_plan(_site()).save(tmp_path / "p.json").read_text())
    assert data["kind"] == plan_module.KIND and data["version"] == plan_module.VERSION
    assert [s["name"] for s in data["sites"]] == ["arch.0"]
    # The site table of DESIGN.md.
    assert {"name", "M", "K", "N", "dtype", "count", "fused", "directions"} == set(data["sites"][0])


def test_same_plan_same_bytes(tmp_path):
    a, b = _site("a"), _site("b")
    one = _plan(a, b).save(tmp_path / "1.json").read_bytes()
    assert _plan(b, a).save(tmp_path / "2.json").read_bytes() == one


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = _plan(_site()).save(tmp_path / "plan.json")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(OSError, match="disk full"):
                _plan(_site("other")).save(path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "a temporary file is left"


def test_the_target_is_never_half_written(tmp_path, monkeypatch):
    """Until the rename, the path holds the old plan in full; the new one is complete by then."""
    path = _plan(_site()).save(tmp_path / "plan.json")
    seen = []
    real = os.replace

    def watch(source, target):
        seen.append((Plan.load(target), Plan.load(source)))
        real(source, target)

    monkeypatch.setattr(os, "replace", watch)
    new = _plan(_site("other"))
    new.save(path)
    assert seen == [(_plan(_site()), new)]
    assert Plan.load(path) == new


def _good() -> dict:
    return _plan(_site()).to_dict()


BAD_TEXT = {
    "empty": "",
    "half": json.dumps(_good())[:200],
    "binary": "\x00\x01\x02",
    "list": "[]",
    "number": "3",
    "foreign": json.dumps({"kind": "something", "version": 1}),
    "no_kind": json.dumps({k: v for k, v in _good().items() if k != "kind"}),
    "newer": json.dumps({**_good(), "version": plan_module.VERSION + 1}),
    "version_text": json.dumps({**_good(), "version": "1"}),
    "no_sites": json.dumps({k: v for k, v in _good().items() if k != "sites"}),
    "sites_number": json.dumps({**_good(), "sites": 5}),
    "site_without_name": json.dumps({**_good(), "sites": [{"directions": {}}]}),
    "site_with_unknown_field": json.dumps(
        {**_good(), "sites": [{**_good()["sites"][0], "colour": "red"}]}
    ),
    "choice_with_unknown_field": json.dumps(
        {**_good(), "sites": [{**_good()["sites"][0], "directions": {"fwd": {"speed": 1}}}]}
    ),
}


@pytest.mark.parametrize("case", list(BAD_TEXT))
def test_bad_files_are_named_and_left_alone(case, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(BAD_TEXT[case])
    before = path.read_bytes(), path.stat().st_mtime_ns
    with pytest.raises(PlanFileError) as caught:
        Plan.load(path)
    text = str(caught.value)
    assert str(path) in text and "left as it" in text
    if case == "newer":
        assert f"version {plan_module.VERSION + 1}" in text and "upgrade" in text
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_missing_and_undecodable_files(tmp_path):
    with pytest.raises(PlanFileError, match="no such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanFileError):
        Plan.load(tmp_path)
    (tmp_path / "latin").write_bytes(b'{"kind": "\xff"}')
    with pytest.raises(PlanFileError, match="cannot be read"):
        Plan.load(tmp_path / "latin")


def test_find_needs_name_and_shape():
    plan = _plan(_site("a", 64, 32))
    assert plan.find("a", 64, 32) is plan.sites["a"]
    assert plan.find("a", 32, 64) is None
    assert plan.find("a", 64, 48) is None
    assert plan.find("b", 64, 32) is None


def test_merge_lets_the_other_win():
    mine = _plan(_site("a"), _site("b"))
    theirs = Plan(
        sites={"b": _site("b", kernel="torchao:rowwise"), "c": _site("c")},
        parameters=("arch.9.weight",),
        env={"torch": "2.14.0"},
    )
    both = mine.merge(theirs)
    assert sorted(both.sites) == ["a", "b", "c"]
    assert both.sites["b"].kernels[0] == "torchao:rowwise"
    assert both.mods and both.env == {"torch": "2.14.0"}
    assert both.parameters == ("arch.0.weight", "arch.9.weight", "größe.weight")
    # Inputs stay as they are, and merging is idempotent.
    assert sorted(mine.sites) == ["a", "b"] and sorted(theirs.sites) == ["b", "c"]
    assert mine.merge(mine) == replace(mine, parameters=tuple(sorted(mine.parameters)))


def test_merge_lets_the_other_win_in_what_is_kept():
    def plan(*parameters, **kept):
        return Plan(mods=EVERY, parameters=parameters, kept=kept)

    mine = plan("a", "a.bias", "b.weight", "c", no_bias=("a", "b", "c"), block_norm=("b",))
    assert mine.merge(mine).kept == mine.kept
    assert plan("a", no_bias=("a",)).merge(plan("a")).kept == {}
    # Linears go by their layer, norms by their gain.
    assert mine.merge(plan("a", "b.weight")).kept == {"no_bias": ("c",)}
    theirs = plan("a", "d", hard_swish=("e",), no_bias=("d",))
    assert mine.merge(theirs).kept == {
        "no_bias": ("b", "c", "d"), "block_norm": ("b",), "hard_swish": ("e",)
    }  # fmt: skip
    # An activation has no parameter: it goes with all the rest.
    assert theirs.merge(plan("d")).kept == {"hard_swish": ("e",)}
    assert theirs.merge(plan("a", "d", "f")).kept == {}


def test_what_the_option_accepts(tmp_path):
    plan = _plan(_site())
    path = plan.save(tmp_path / "p.json")
    assert Plan.of_option(None) is None and Plan.of_option(plan) is plan
    assert Plan.of_option(path) == Plan.of_option(str(path)) == plan
    assert Plan.of_option(plan.to_dict()) == plan
    with pytest.raises(PlanFileError):
        Plan.of_option({"kind": "else"})


def test_an_unplanned_direction_is_high_precision():
    site = SitePlan("a", 1, 16, 16, "float32")
    assert site.kernels == (HIGH_PRECISION,) * 3
    assert not site.choice("wgrad").is_fp8
