"""Says what changed from one run of a job to another. A report shows one run, or two."""

from __future__ import annotations

from collections.abc import Callable

from horovod_partial.insight.report.summary import Summary, listed

Runs = dict[str, Summary]  # the runs of a report, by label: one labelled "", or two labelled "before" and "after"


def labelled(summaries: list[Summary]) -> Runs:
    """Return the runs of a report: one, or the run before and the run after."""
    return dict(zip(("before", "after") if len(summaries) > 1 else ("",), summaries, strict=True))


def name(text: str, label: str) -> str:
    """Return a text, and behind it the label of its run if the report has two."""
    return f"{text}, {label}" if label else text


def of_each(runs: Runs, texts: Callable[[Summary], list[str]]) -> list[str]:
    """Return texts on each run, and before each text the label of its run if the report has two."""
    return [f"{label.capitalize()}: {text}" if label else text for label, run in runs.items() for text in texts(run)]


def headline(runs: Runs) -> str:
    """Return a few words that say which rank is slow, or of two runs how long a step takes."""
    return _changes(**runs)[0].capitalize() if len(runs) > 1 else runs[""].headline


def sentences(runs: Runs) -> list[str]:
    """Return what changed, if there are two runs, and of each run which rank is slow and how long ranks have waited."""
    each = of_each(runs, lambda run: [run.answer, run.waiting])
    return [f"After: {'; '.join(_changes(**runs))}.", *each] if len(runs) > 1 else each


def _changes(before: Summary, after: Summary) -> list[str]:
    ratio = before.step_seconds / after.step_seconds
    times = f"{max(ratio, 1 / ratio):.2f}"
    speed = f" ({times} times {'faster' if ratio > 1 else 'slower'})" if times != "1.00" else ""
    step = _instead("a step takes {} ms", f"{1e3 * after.step_seconds:.1f}", f"{1e3 * before.step_seconds:.1f}")
    wait = _instead("each rank waits for {} of the time", f"{after.waited_share:.0%}", f"{before.waited_share:.0%}")
    size = ("{} ranks", after.recording.size, before.recording.size)
    policy = ("policy {}", after.steps.policy, before.steps.policy)
    return [step + speed, wait, *_slowness(before, after), *(_instead(*of) for of in (size, policy) if of[1] != of[2])]


def _slowness(before: Summary, after: Summary) -> list[str]:
    was, now = ({rank.rank: rank.slowness for rank in run.slow} for run in (before, after))
    there = {rank.rank for rank in after.ranks}
    gone = [rank for rank in was if rank not in there]
    missing = [f"{listed(gone)} not in this run, and slow before"] if gone else []
    if not now:
        is_over = was and not gone and not after.unclear
        return [after.headline[0].lower() + after.headline[1:] + (" any more" if is_over else ""), *missing]
    told = []
    judged = {rank.rank for rank in before.ranks} if before.slow or not before.unclear else set()
    for text, ranks in (
        ("no longer slow", [rank for rank in was if rank in there and rank not in now]),
        ("still slow", [rank for rank in now if rank in was]),
        ("slow now", [rank for rank in now if rank not in was and rank in judged]),
        ("slow", [rank for rank in now if rank not in was and rank not in judged]),
    ):
        kinds = ", ".join(dict.fromkeys(now[rank].kind for rank in ranks if rank in now))
        if ranks:
            told.append(f"{listed(ranks)} {text}" + (f" ({kinds})" if kinds else ""))
    return told + missing


def _instead(form: str, new: object, old: object) -> str:
    return form.format(new) + (f" in place of {old}" if new != old else ", as before")
