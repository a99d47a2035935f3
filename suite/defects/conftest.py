"""A run with ``-m defects`` judges planted defects: they are the gates of that run, and it ends with the heat map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from fixtures.plugin import RUN
from fixtures.pytest_support.selection import marks_asked
from reports.evidence import EvidenceError

if TYPE_CHECKING:
    from suite.contract import Gate


@pytest.hookimpl(tryfirst=True)
def pytest_kvgates_registry(config: pytest.Config) -> Mapping[str, Gate] | None:
    if not marks_asked(config, ("defects",)):
        return None
    from suite.defects.planted_elsewhere import registry  # why here: only a run of defects needs them

    return registry()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash.get(RUN, None)
    if (
        run is None
        or run.is_worker
        or not marks_asked(config, ("defects",))
        or not any(run.options.run_dir.glob("history*.jsonl"))
    ):
        return
    from reports.render import heatmap
    from suite.defects.heatmap import of_runs, write

    terminalreporter.section("heat map")
    try:
        heat = of_runs([run.options.run_dir])
        paths = write(heat, run.options.run_dir)
    except (EvidenceError, OSError) as exc:
        terminalreporter.write_line(f"no heat map: {exc}")
        return
    for line in heatmap.to_text(heat).splitlines():
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"wrote {', '.join(str(path) for path in paths)}")
