"""The loop of a role of which one instance acts at a time: promoter and scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from chasqui.errors import ChasquiError
from chasqui.metrics import LockOutcome
from chasqui.protocol.lease import Lease
from chasqui.redis_io import AsyncLink

log = logging.getLogger("chasqui.leader")

_LONGEST_WAIT_S = 1.0


async def lead(
    link: AsyncLink,
    lease: Lease,
    role: Literal["promoter", "scheduler"],
    pass_once: Callable[[], Awaitable[bool | None]],
    *,
    interval_ms: int,
    stop: asyncio.Event,
    on_change: Callable[[LockOutcome], None],
) -> None:
    """Call ``pass_once`` every interval until ``stop``, and give the lease back.

    A pass takes or renews the lease itself, in its script. It answers None when another leads, True when there is
    more to do at once, False when it is done for now. Errors of the server are waited out: after any outage the loop
    goes on by itself.
    """
    leading: bool | None = None
    failures = 0
    while not stop.is_set():
        wait_s = interval_ms / 1000
        try:
            more = await pass_once()
            failures = 0
            if leading != (more is not None):
                leading = more is not None
                on_change(LockOutcome("acquired" if leading else "held", role))
            if more:
                wait_s = 0
        except ChasquiError as error:
            if failures == 0:
                log.warning("%s of %s: %s; trying again", role, lease.key, error.message)
            wait_s = min(_LONGEST_WAIT_S, 0.05 * 2 ** min(failures, 10))
            failures += 1
        if wait_s == 0:
            await asyncio.sleep(0)
            continue
        try:
            async with asyncio.timeout(wait_s):
                await stop.wait()
        except TimeoutError:
            pass
    if leading:
        try:
            await link.run(lease.release())
        except ChasquiError as error:
            log.info("%s: the lease was not given back (%s); it ends by itself", role, error.message)
