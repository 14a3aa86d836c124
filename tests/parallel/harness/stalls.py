"""What a job has written about a long wait."""

import re
from collections.abc import Sequence

TOLD = "waiting for [0-9.]+ s and longer: "
OVER = "the reported wait is over"
_LINE = re.compile(r"(?m)^\[(?:1,)?(\d+)\]<stderr>:(.*)$")


def told(output: str) -> list[str]:
    """The lines in which rank 0 says who waits and who is missing."""
    return [text for rank, text in _LINE.findall(output) if rank == "0" and re.search(TOLD, text)]


def stacks(output: str, rank: int) -> str:
    """The stacks that a rank has written, with what stands above them; empty if it has not written them whole."""
    text = "\n".join(text for of, text in _LINE.findall(output) if of == str(rank))
    begin = text.find("The stacks of all its threads:")
    return text[begin:] if begin >= 0 and "in <module>" in text[begin:] else ""


def explains(output: str, *, sleeper: int, waiting: Sequence[int], stopped: int | None = None) -> bool:
    """Whether all is there: who is asleep, who is stopped, and the stacks of all but that one."""
    lines = told(output)
    if not lines or not all(stacks(output, rank) for rank in (sleeper, *waiting)):
        return False
    missing = f"Missing: rank {sleeper}, which computes or sleeps"
    if stopped is not None:
        missing += f"; rank {stopped}, which has given no sign of life for"
    return (
        missing in lines[0]
        and "sleep_between_steps" in stacks(output, sleeper)
        and all(re.search("in (step|flush|barrier)", stacks(output, rank)) for rank in waiting)
    )
