"""Makes forecasts in a program of its own, at the lowest priority, for the worker: a long queue takes it half a minute
of a processor, for which no round of placement may wait.

    python -m berth.forecaster     a pickled snapshot and settings on standard input, seconds by UID as JSON on output
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import sys

from activities.forecasts import Forecast, forecast
from berth.extensions import load_strategies
from crds.settings import Settings
from planning.model import Snapshot

# Seconds of a processor, should whoever asked no longer be there to end it.
_MOST = 600


class ForecastError(Exception):
    """The forecaster ended without an answer; its last line says why."""


async def forecast_aside(snapshot: Snapshot, settings: Settings) -> Forecast:
    """The same as `activities.forecasts.forecast`, beside this process. Raises ForecastError."""
    asked = await asyncio.to_thread(pickle.dumps, (snapshot, settings), pickle.HIGHEST_PROTOCOL)
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "berth.forecaster", stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        answer, complaint = await program.communicate(asked)
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    if program.returncode:
        last = (complaint.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise ForecastError(f"the forecaster failed (exit status {program.returncode}): {last[:200]}")
    early, late = json.loads(answer)
    return Forecast(snapshot.now, early, late)


def main() -> None:
    """Entry point."""
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST, _MOST))
    load_strategies()
    snapshot, settings = pickle.load(sys.stdin.buffer)  # noqa: S301  # from the worker that started this program
    found = forecast(snapshot, settings)
    json.dump([found.early, found.late], sys.stdout)


if __name__ == "__main__":
    main()
