"""Command `top`: a live view of a bridge, from the differences between two of its status reports."""

import signal
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, TypeAlias

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from draftbridge import CallError, Client
from draftbridge.v1 import bridge_pb2, model_pb2
from services.cli.connection import Connect, Server, connecting
from services.cli.fitted import Fitted
from services.cli.terminal import fail, out
from services.config import DEFAULT_BRIDGE

Counts: TypeAlias = tuple[float, ...]


@connecting
def top(
    connect: Connect,
    server: Server = DEFAULT_BRIDGE,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the view since the bridge's start, and end.")] = False,
) -> None:
    """Show what a bridge does: requests, speed, acceptance by source, plans, services. Ctrl-C ends it."""
    with connect(server) as client:
        if once:
            out.print(view(server, client.status()))
        elif not out.is_terminal or out.is_dumb_terminal:
            fail("a live view needs a terminal that moves its cursor: use --once to print it")
        else:
            _live(client, server, interval)


def _live(client: Client, server: str, interval: float) -> None:
    # SIGTERM too must leave the terminal as it was.
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts its background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    before = None
    try:
        with Live(screen=True, auto_refresh=False, console=out) as live:
            while True:
                began = time.monotonic()
                try:
                    status = client.status()
                    live.update(view(server, status, before), refresh=True)
                    before = status
                except CallError as error:
                    live.update(Text(str(error), "bold red"), refresh=True)
                    before = None
                # The view changes once per interval; Ctrl-C interrupts the sleep.
                time.sleep(max(interval - (time.monotonic() - began), 0.0))
    except KeyboardInterrupt:
        return


@dataclass
class Figures:
    """The counts of a status report, running generations included."""

    finished: int = 0
    tokens: float = 0
    passes: float = 0
    # Of finished generations only.
    first_token_ns: float = 0
    later_ns: float = 0
    later_tokens: float = 0
    # By name: passes with candidates, candidates, accepted ones.
    sources: dict[str, Counts] = field(default_factory=dict)
    # By kind: passes, tokens, nanoseconds, predicted tokens, predicted nanoseconds.
    plans: dict[str, Counts] = field(default_factory=dict)

    @classmethod
    def of(cls, status: bridge_pb2.GetStatusResponse) -> "Figures":
        """Adds up a status report."""
        totals = status.speculation
        figures = cls(
            finished=status.finished_count,
            tokens=status.generated_token_count + sum(one.generated_token_count for one in status.running),
            first_token_ns=totals.first_token_ns,
            later_ns=totals.elapsed_ns - totals.first_token_ns,
            later_tokens=status.generated_token_count - status.finished_count,
        )
        for one in (totals, *(running.speculation for running in status.running)):
            figures.passes += one.target_pass_count
            for source in one.sources:
                counted = source.num_drafts, source.num_draft_tokens, source.num_accepted_tokens
                _add(figures.sources, source.name, *counted)
            for plan in one.plans:
                predicted = plan.predicted_token_count, plan.predicted_ns
                _add(figures.plans, plan.plan, plan.target_pass_count, plan.token_count, plan.elapsed_ns, *predicted)
        return figures

    def since(self, before: "Figures") -> "Figures":
        """Returns the differences, 0 where a count is smaller now because a generation failed or was cancelled."""
        return Figures(
            finished=max(self.finished - before.finished, 0),
            tokens=max(self.tokens - before.tokens, 0),
            passes=max(self.passes - before.passes, 0),
            first_token_ns=max(self.first_token_ns - before.first_token_ns, 0),
            later_ns=max(self.later_ns - before.later_ns, 0),
            later_tokens=max(self.later_tokens - before.later_tokens, 0),
            sources=_since(self.sources, before.sources),
            plans=_since(self.plans, before.plans),
        )


def _add(counts: dict[str, Counts], name: str, *new: float) -> None:
    counts[name] = tuple(one + other for one, other in zip_longest(counts.get(name, ()), new, fillvalue=0))


def _since(now: dict[str, Counts], before: dict[str, Counts]) -> dict[str, Counts]:
    return {
        name: tuple(max(one - old, 0) for one, old in zip_longest(counts, before.get(name, ()), fillvalue=0))
        for name, counts in now.items()
    }


def view(
    server: str, status: bridge_pb2.GetStatusResponse, before: bridge_pb2.GetStatusResponse | None = None
) -> Group:
    """Returns the view of a status report: since an earlier one, or since the bridge's start, which may be later."""
    figures, seconds, period = Figures.of(status), status.uptime_ns / 1e9, "since the start"
    if before is not None and status.uptime_ns > before.uptime_ns:
        # The bridge's own clock: it may have taken seconds to answer, and counts at the end of them.
        figures, seconds = figures.since(Figures.of(before)), (status.uptime_ns - before.uptime_ns) / 1e9
        period = f"the last {seconds:.1f} s"
    heading = Text(
        f"{server}   version {status.version}   up {_duration(status.uptime_ns)}   requests: {status.active_count} "
        f"running, {status.finished_count} finished, {status.failed_count - status.refused_count} failed, "
        f"{status.refused_count} refused, {status.cancelled_count} cancelled",
        "bold",
    )
    tables = (
        _speed(figures, seconds, period),
        _sources(figures, seconds),
        _plans(figures),
        _running(status),
        _endpoints(status),
    )
    return Group(heading, *map(Fitted, tables))


def _speed(figures: Figures, seconds: float, period: str) -> Table:
    table = _table(f"speed, {period}", "tokens/s", "passes/s", "tokens/pass", "first token", "time per token")
    table.add_row(
        _ratio(figures.tokens, seconds, "{:.1f}"),
        _ratio(figures.passes, seconds, "{:.1f}"),
        _ratio(figures.tokens, figures.passes, "{:.2f}"),
        _ratio(figures.first_token_ns / 1e6, figures.finished, "{:.1f} ms"),
        _ratio(figures.later_ns / 1e6, figures.later_tokens, "{:.2f} ms"),
    )
    return table


def _sources(figures: Figures, seconds: float) -> Table:
    table = _table("candidates", "source", "per second", "accepted", "acceptance", "per pass")
    for name, (passes, candidates, accepted) in sorted(figures.sources.items()):
        table.add_row(
            Text(name),
            _ratio(candidates, seconds, "{:.1f}"),
            _ratio(accepted, seconds, "{:.1f}"),
            _ratio(accepted, candidates, "{:.0%}"),
            _ratio(candidates, passes, "{:.1f}"),
        )
    return table


def _plans(figures: Figures) -> Table:
    table = _table("what the planner chooses", "plan", "passes", "tokens/s", "predicted", "measured/predicted")
    all_passes = sum(passes for passes, *_ in figures.plans.values())
    for name, (passes, tokens, ns, predicted_tokens, predicted_ns) in sorted(figures.plans.items()):
        table.add_row(
            Text(name),
            _ratio(passes, all_passes, "{:.0%}"),
            _ratio(tokens * 1e9, ns, "{:.1f}"),
            _ratio(predicted_tokens * 1e9, predicted_ns, "{:.1f}"),
            _ratio(tokens * predicted_ns, ns * predicted_tokens, "{:.2f}x"),
        )
    return table


def _running(status: bridge_pb2.GetStatusResponse) -> Table:
    listed, all_ = len(status.running), status.active_count
    title = f"requests, {listed} of {all_}" if listed < all_ else "requests"
    table = _table(title, "target", "draft", "age", "tokens", "tokens/s", "accepted")
    for one in status.running:
        speculation = one.speculation
        table.add_row(
            Text(one.target or "(encoding)"),
            Text(one.draft or "-"),
            _duration(one.elapsed_ns),
            str(one.generated_token_count),
            _ratio(one.generated_token_count * 1e9, one.elapsed_ns, "{:.1f}"),
            _ratio(speculation.num_accepted_tokens, speculation.num_draft_tokens, "{:.0%}"),
        )
    return table


def _endpoints(status: bridge_pb2.GetStatusResponse) -> Table:
    table = _table("services", "address", "role", "state")
    for one in status.endpoints:
        role = model_pb2.Role.Name(one.role).removeprefix("ROLE_").lower()
        table.add_row(Text(one.address), role, Text("ready", "green") if one.reachable else Text(one.problem, "red"))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold cyan", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _ratio(over: float, under: float, form: str) -> str:
    return form.format(over / under) if under else "-"


def _duration(ns: float) -> str:
    seconds = int(ns / 1e9)
    if seconds < 60:
        return f"{ns / 1e9:.1f} s"
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds % 60:02} s"
