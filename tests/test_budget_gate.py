"""gate="budget" from the first step to the plan: scores, assignment, replay, and what is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy
from torch.nn.functional import binary_cross_entropy_with_logits

import loka_compile
from loka_compile import loka_backend
from loka_compile import planner
from loka_compile.ledger import LEDGER

ROWS = 96
OPTIONS = {
    "inner": "eager", "emulate": True, "mods": "off", "gate": "budget", "libraries": ["torch"],
    "recipes": ["rowwise"],
}  # fmt: skip


def model(*last: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 1)]
    return nn.Sequential(*layers, *last)


def log_loss(y):
    return binary_cross_entropy_with_logits(y.squeeze(-1), torch.rand(len(y)).round())


def train(one: nn.Module, loss=log_loss, count: int = 9, call=None, **options):
    torch._dynamo.reset()
    run = torch.compile(call or one, backend=loka_backend, options={**OPTIONS, **options})
    with loka_compile.explain() as report:
        for _ in range(count):
            y = run(torch.randn(ROWS, 32))
            loss(y).backward()
    return loka_compile.plan_of(one), report


def in_fp8(plan) -> set[str]:
    return {name for name, site in plan.sites.items() if site.choice("fwd").is_fp8}


def test_a_budget_decides_how_many_sites_go() -> None:
    one = model()
    loose, report = train(one, loss_budget=1.0)
    assert in_fp8(loose) == {"0", "2"}
    losses = {n: loose.sites[n].choice("fwd").nats for n in ("0", "2")}
    assert all(0 < v < 1e-2 for v in losses.values())
    assert loose.predicted_nats == pytest.approx(sum(losses.values()))
    # One whole replay agrees with the sum of the single scores.
    assert 0.3 * loose.predicted_nats < loose.replayed_nats < 3 * loose.predicted_nats
    text = report.text()
    assert "loss budget 1 nats per sample: 2 forwards in FP8" in text
    assert "predicted loss" in report.why("0")
    # Room for the cheaper one only, measured as a whole too.
    between = 1.5 * min(losses.values())
    assert between < sum(losses.values())
    tight, _ = train(model_like(one), loss_budget=between)
    assert len(in_fp8(tight)) < 2 and tight.predicted_nats <= between
    assert tight.replayed_nats <= between
    none, report = train(model_like(one), loss_budget=1e-12)
    assert not in_fp8(none) and none.predicted_nats in (None, 0.0)
    assert "whole budget" in none.sites["0"].choice("fwd").reason
    # The loss of a backward shows later only: the local gate holds it.
    assert none.sites["0"].choice("dgrad").is_fp8


def model_like(one: nn.Module) -> nn.Module:
    other = model()
    other.load_state_dict(one.state_dict())
    return other


def test_scores_are_those_of_an_exact_jacobian() -> None:
    from loka_compile.probe import gauss_newton as gn

    one = model()
    torch.manual_seed(3)
    plan, _ = train(one, inner="aot_eager", loss_budget=1.0)
    kernel = plan.sites["2"].choice("fwd").kernel + "+emulated"
    x = torch.randn(4096, 32)
    hidden = one[:2](x).detach().requires_grad_()
    y = one[2](hidden)
    y.retain_grad()
    logit = one[3:](y)
    logit.sum().backward()
    want = gn.logit_score(kernel, one[2].weight, hidden.detach(), y.grad, logit.detach().sigmoid())
    assert plan.sites["2"].choice("fwd").nats == pytest.approx(want, rel=0.3)


def test_the_extra_backward_leaves_no_trace() -> None:
    """Neither in the gradients nor in what the Probe records."""
    kept = []
    for gate in ("robust", "budget"):
        torch.manual_seed(1)
        one = model()
        train(one, inner="aot_eager", count=8, gate=gate, probe_every=0)
        held = LEDGER.find(one[2].weight).statistics[(0, "g")]
        kept.append([*(p.grad for p in one.parameters()), *held.tensors])
        assert held.batches == 8
    for a, b in zip(*kept, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_rows_of_one_sample_stand_together() -> None:
    """Three rows per sample: M = 3 B, and their errors add up before they are squared."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(32, 48), nn.Linear(48, 1)

        def forward(self, x):
            return self.out(self.up(x.view(-1, 3, 32)).relu().sum(1))

    one = Tokens()
    torch._dynamo.reset()
    run = torch.compile(one, backend=loka_backend, options={**OPTIONS, "loss_budget": 1.0})
    for _ in range(9):
        log_loss(run(torch.randn(ROWS, 96))).backward()
    plan = loka_compile.plan_of(one)
    assert in_fp8(plan) == {"up"}
    nats = plan.sites["up"].choice("fwd").nats
    assert 0.5 * nats < plan.replayed_nats < 2 * nats


def test_several_tasks_and_probabilities() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(32, 48), nn.Linear(48, 2)

        def forward(self, x):
            return self.heads(self.body(x).relu())

    def both(y):
        return binary_cross_entropy_with_logits(y, torch.rand_like(y).round())

    plan, _ = train(Towers(), both, loss_budget=1.0)
    assert in_fp8(plan) == {"body"}
    nats = plan.sites["body"].choice("fwd").nats
    assert 0.4 * nats < plan.replayed_nats < 2.5 * nats

    def of_probability(y):
        return 7 * binary_cross_entropy(y.squeeze(-1), torch.rand(len(y)).round(), reduction="sum")

    plan, _ = train(model(nn.Sigmoid()), of_probability, loss_budget=1.0)
    assert in_fp8(plan) == {"0", "2"} and 0 < plan.replayed_nats < 1e-2


@pytest.mark.parametrize("case", ["loss", "break", "inside", "frozen"])
def test_no_score_no_fp8_and_the_reason(case: str) -> None:
    one = model()
    call, loss = one, log_loss
    if case == "loss":
        want = "plain log loss"

        def loss(y):
            return y.square().mean()

    elif case == "inside":
        want = "without its loss"

        def call(x):
            return log_loss(one(x))

        def loss(y):
            return y

    elif case == "break":
        want = "no output of this graph can be logits"

        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = one[:2], one[2:]

            def forward(self, x):
                x = self.first(x)
                torch._dynamo.graph_break()
                return self.last(x)

        call = Broken()
    else:
        want = "takes none"
        one[0].weight.requires_grad_(False)
    plan, _ = train(one, loss, call=call, loss_budget=1.0)
    found = next(s for s in plan.sites.values() if (s.K, s.N) == (32, 64))
    assert not found.choice("fwd").is_fp8 and want in found.choice("fwd").reason, found


def test_inference_says_that_it_needs_training() -> None:
    torch._dynamo.reset()
    run = torch.compile(model(), backend=loka_backend, options=OPTIONS)
    with loka_compile.explain() as report, torch.no_grad():
        run(torch.randn(ROWS, 32))
    assert "gate='budget' makes one in training" in report.text()


def test_buffers_and_random_state_survive_a_replay() -> None:
    torch.manual_seed(2)
    one = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1))
    plan, _ = train(one, count=9, loss_budget=1.0)
    assert plan.replayed_nats is not None and plan.replayed_nats < 1e-2
    assert int(one[1].num_batches_tracked) == 9


def test_a_replay_over_budget_shrinks_the_assignment() -> None:
    from loka_compile import scoring

    asked = []

    def choose(budget: float) -> float:
        asked.append(budget)
        return budget

    # The whole costs three times the sum that was promised.
    chosen, measured = scoring.within(choose, lambda c: 3 * c, 1e-4)
    assert len(asked) == 2 and chosen < 1e-4 / 3 and measured <= 1e-4
    chosen, measured = scoring.within(choose, lambda c: 1.0 if c else 0.0, 1e-4)
    assert chosen == 0.0 and measured == 0.0
    assert scoring.within(choose, lambda c: None, 1e-4) == (1e-4, None)


def test_make_plan_with_the_real_loss() -> None:
    torch._dynamo.reset()
    data = [(torch.randn(ROWS, 32),) for _ in range(3)]
    plan = loka_compile.make_plan(
        model(), data[0], loss=log_loss, batches=data[1:], options={**OPTIONS, "loss_budget": 1.0}
    )
    assert in_fp8(plan) == {"0", "2"} and 0 < plan.predicted_nats < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_on_a_gpu(mode: str | None, monkeypatch) -> None:
    """Real kernels, Inductor, CUDA graphs: the second backward and the replay work there too."""
    torch._dynamo.reset()
    # Of a model this small FP8 is not the faster form: without prices the budget alone decides.
    monkeypatch.setattr(planner, "_prices", lambda *_: ({}, {}))
    cuda = torch.device("cuda")
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)]
    one = nn.Sequential(*layers).to(cuda, torch.bfloat16)
    options = {"mods": "off", "gate": "budget", "loss_budget": 1.0, "min_speedup": 0, "mode": mode}
    run = torch.compile(one, backend=loka_backend, options=options)
    sgd = torch.optim.SGD(one.parameters(), lr=1e-3)
    for _ in range(14):
        torch.compiler.cudagraph_mark_step_begin()
        y = run(torch.randn(4096, 512, device=cuda, dtype=torch.bfloat16)).float().squeeze(1)
        label = torch.rand(4096, device=cuda).round()
        binary_cross_entropy_with_logits(y, label).backward()
        sgd.step()
        sgd.zero_grad()
    plan = loka_compile.plan_of(one)
    assert in_fp8(plan) == {"0", "2"}
    assert 0.2 * plan.predicted_nats < plan.replayed_nats < 5 * plan.predicted_nats
