"""What a hub means when it answers with anything but bytes: to be tried again, or a sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from ..errors import CheckpointError
from .hub_exchange import Answer, printable
from .hub_patience import Passing

BUSY = (408, 429)
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds of Retry-After, as a number or a date, or of the reset time in a RateLimit header."""
    stated = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}", stated):
        return float(stated)
    try:
        return max(0.0, (parsedate_to_datetime(stated) - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        reset = re.search(r"\br=0\s*;\s*t=(\d{1,9})\b", headers.get("ratelimit", ""))
        return float(reset[1]) if reset else None


def refusal(answer: Answer, repo: str, what: str, revision: str | None, endpoint: str) -> Exception:
    """The error that an answer without the bytes of `what` stands for; Passing where another try may help."""
    status, page = answer.status, f"{endpoint}/{repo}"
    code, said = answer.headers.get("x-error-code", ""), printable(answer.headers.get("x-error-message", ""))
    if status in BUSY or 500 <= status < 600:
        return Passing(f"HTTP {status}", _asked_wait(answer.headers))
    if code == "GatedRepo" and status in (401, 403):
        return CheckpointError(
            f"{repo} is gated: accept its terms at {page}, {LOG_IN}, and run the same command again."
        )
    if status == 401 and "nvalid credentials" in said:
        return CheckpointError(f"The hub takes the token for none of its own; {LOG_IN} anew to read {repo}.")
    if code == "RevisionNotFound":
        return CheckpointError(f"{repo} has no revision {revision!r}; {page}/commits lists them.")
    if code == "EntryNotFound":
        return CheckpointError(f"{repo} has no {what}, although the hub lists it; try again later.")
    if status in (401, 404):
        return CheckpointError(
            f"{repo} could not be read from the hub: there is none of that name, or it is private; "
            f"look at {page}, and {LOG_IN} where it is private or gated."
        )
    if status == 403:
        return CheckpointError(
            f"{repo} may not be read with this token or account{f' ({said})' if said else ''}: "
            f"look at {page} whether it is gated and has terms to accept, and {LOG_IN}."
        )
    return CheckpointError(
        f"The hub answers {what} of {repo} with HTTP {status}{f' ({said})' if said else ''}; try again later."
    )
