"""`benchmarks/papers`: each experiment in its smoke form, and the documents as the stored figures make them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = {
    "eager_sgd": ("fig2", "fig3", "fig4", "fig9", "fig10", "fig11", "table2", "fig12", "fig13"),
    "wagma_sgd": ("fig4", "fig5", "waits", "ablations", "fig6", "fig7", "fig8", "fig9", "fig10"),
    "p_reduce": ("speedup", "heterogeneity", "rho", "weights", "isolation", "independent", "rate"),
    "wp_sgd": ("fig3", "fig6", "fig7", "fig8", "fig9", "fig10", "ranks", "last_average"),
    "mg_wfbp": ("theorem1", "fig4", "table4", "fig5", "fig6", "fig7", "fig8", "fig9", "fig10", "fig11"),
}
IN_EVERY_RUN = {("mg_wfbp", "fig10"), ("wagma_sgd", "fig10"), ("p_reduce", "rho")}  # they start no ranks


def run(*arguments: str, seconds: float = 280.0) -> subprocess.CompletedProcess[str]:
    """A program of its own, as its modules are named like those of the tests."""
    command = [sys.executable, str(ROOT / "benchmarks" / "papers"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.timeout(300)  # some start jobs, one after the other
@pytest.mark.parametrize(
    ("paper", "experiment"),
    [
        pytest.param(paper, experiment, marks=() if (paper, experiment) in IN_EVERY_RUN else pytest.mark.full_matrix)
        for paper, experiments in EXPERIMENTS.items()
        for experiment in experiments
    ],
)
def test_smoke(paper: str, experiment: str, tmp_path: Path) -> None:
    done = run(paper, experiment, "--smoke", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nan" not in done.stdout
    assert (tmp_path / f"{paper}_{experiment}.png").stat().st_size > 1000


def test_the_pages_are_those_of_the_stored_figures(tmp_path: Path) -> None:
    done = run("--write-docs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    pages = ["papers.md", *(f"papers/{paper.replace('_', '-')}.md" for paper in EXPERIMENTS)]
    for page in pages:
        assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("paper", EXPERIMENTS)
def test_a_page_marks_what_was_not_measured_quietly(paper: str) -> None:
    page = (ROOT / "docs" / "papers" / f"{paper.replace('_', '-')}.md").read_text()
    for experiment in EXPERIMENTS[paper]:
        kept = json.loads((ROOT / "benchmarks" / "papers" / "results" / f"{paper}.{experiment}.json").read_text())
        marked = kept["about"]["busy"] and any(row["how"] == "measured" for row in kept["rows"])
        section = page.partition(f"`benchmarks/papers {paper} {experiment}`:")[2].partition("\n## ")[0]
        assert ("**Not quiet:**" in section) == marked, experiment


@pytest.mark.full_matrix
@pytest.mark.parametrize("paper", EXPERIMENTS)
def test_all_experiments_are_here(paper: str) -> None:
    done = run(paper, "none of these")
    assert done.returncode == 2
    assert f"the experiments of {paper} are {', '.join(EXPERIMENTS[paper])}\n" in done.stderr
