"""README, the two pyproject.toml, the CI files and scripts/matrix.sh agree on versions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks/matrix.json"
Version = tuple[int, ...]
Range = tuple[Version, Version]


def version(text: str) -> Version:
    """Major and minor."""
    return tuple(int(part) for part in text.split(".")[:2])


def pairs() -> dict[tuple[Version, Version], dict[str, Any]]:
    """What the record says of each pair of torch and Python."""
    entries = json.loads(RECORD.read_text())["pairs"]
    return {tuple(version(part) for part in e["asked"].split("/")): e for e in entries}  # type: ignore[misc]


def planned_pairs() -> list[dict[str, str]]:
    """What .ci/matrix.json plans."""
    planned: list[dict[str, str]] = json.loads((ROOT / ".ci/matrix.json").read_text())["pairs"]
    return planned


def claimed(name: str) -> Range:
    """The range of versions that README names."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(rf"\b{name} (\d\.\d+) to (\d\.\d+)\b", text)
    assert len(found) == 1
    return version(found[0][0]), version(found[0][1])


def test_the_readme_names_the_versions_of_the_record() -> None:
    torches, pythons = zip(*pairs(), strict=True)
    assert claimed("torch") == (min(torches), max(torches))
    assert claimed("Python") == (min(pythons), max(pythons))


def test_the_newest_torch_that_the_readme_names_passed() -> None:
    passed = [pair for pair, entry in pairs().items() if entry["status"] == "passed"]
    assert claimed("torch")[1] in [torch for torch, _ in passed]


def test_the_readme_says_what_fails() -> None:
    said = re.findall(
        r"([\d,]+ of [\d,]+) tests fail with torch (\d\.\d+)", (ROOT / "README.md").read_text()
    )
    failed = [(torch, e) for (torch, _), e in pairs().items() if e["status"] == "failed"]
    due = [(f"{e['failed']:,} of {e['passed'] + e['failed']:,}", torch) for torch, e in failed]
    assert [(count, version(torch)) for count, torch in said] == due


def test_an_entry_says_what_ran_or_why_not() -> None:
    for entry in pairs().values():
        if entry["status"] == "not run here":
            assert entry["why"], entry
            continue
        torch, python = entry["asked"].split("/")
        assert entry["torch"].split("+")[0] == torch, entry
        assert version(entry["python"]) == version(python), entry
        assert entry["passed"] > 9_000, entry  # the whole of the core's tests
        assert (entry["status"] == "passed") == (entry["failed"] == 0), entry


def test_the_record_has_the_pairs_that_the_script_runs_on_linux() -> None:
    recorded = {entry["asked"] for entry in pairs().values()}
    planned = {f"{e['torch']}/{e['python']}" for e in planned_pairs() if "Linux" in e["system"]}
    assert planned <= recorded


def test_the_install_page_counts_the_pairs_that_passed() -> None:
    said = re.findall(r"(\d+) of (\d+) pairs", (ROOT / "docs/install.md").read_text())
    passed = sum(entry["status"] == "passed" for entry in pairs().values())
    assert said == [(str(passed), str(len(planned_pairs())))]


def test_the_plan_covers_what_the_readme_claims() -> None:
    """Each version of both, on each system the oldest or newest torch, and nothing beyond."""
    for name in ("torch", "Python"):
        oldest, newest = claimed(name)
        versions = {version(entry[name.lower()]) for entry in planned_pairs()}
        assert versions == {(oldest[0], minor) for minor in range(oldest[1], newest[1] + 1)}
    systems = {entry["system"] for entry in planned_pairs()}
    latest = {e["system"] for e in planned_pairs() if version(e["torch"]) == claimed("torch")[1]}
    assert systems == latest == {"Linux-x86_64", "Linux-aarch64", "Darwin-arm64", "Windows-AMD64"}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("event", ["push", "pull_request", "schedule", "workflow_dispatch"])
def test_the_hosted_run_has_the_planned_pairs_and_weekly_all(event: str, tmp_path: Path) -> None:
    """Weekly: each torch with each Python that the README names, on each system of the plan."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert event in workflow[True]  # what YAML 1.1 makes of "on"
    (step,) = (each for each in workflow["jobs"]["matrix"]["steps"] if "run" in each)
    output = tmp_path / "output"
    environment = {**os.environ, "EVENT": event, "GITHUB_OUTPUT": str(output)}
    subprocess.run(["bash", "-ec", step["run"]], check=True, cwd=ROOT, env=environment)
    given = json.loads(output.read_text().removeprefix("pairs="))
    if event in ("push", "pull_request"):
        assert given == planned_pairs()
        return
    ranges = [range(claimed(name)[0][1], claimed(name)[1][1] + 1) for name in ("torch", "Python")]
    systems = {(each["system"], each["runner"]) for each in planned_pairs()}
    wanted = {(*each, minor, other) for each in systems for minor, other in product(*ranges)}
    found = [
        (e["system"], e["runner"], version(e["torch"])[1], version(e["python"])[1]) for e in given
    ]
    assert len(found) == len(wanted) == 80
    assert set(found) == wanted
    exact = {(e["torch"], e["python"], e["system"]) for e in given}
    assert {(e["torch"], e["python"], e["system"]) for e in planned_pairs()} <= exact


@pytest.mark.parametrize("name", ["ci", "wheels"])
def test_a_workflow_calls_what_is_there(name: str) -> None:
    """Files of the repository by name, and jobs that other jobs wait for."""
    text = (ROOT / f".github/workflows/{name}.yml").read_text()
    workflow = yaml.safe_load(text)
    for path in set(re.findall(r"(?:scripts|tests|\.ci|\.github)/[\w./-]+\w", text)):
        assert (ROOT / path).exists(), path
    jobs = workflow["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        assert job["steps"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        for step in job["steps"]:
            if "run" in step:
                script = re.sub(r"\$\{\{.*?\}\}", "2.15.0", step["run"])
                subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_wheels_are_built_for_each_version_of_python() -> None:
    """One for the oldest, and one that is abi3 from the next on."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    oldest = claimed("Python")[0]
    stable = tool["scikit-build"]["wheel"]["py-api"]
    assert stable == f"cp{oldest[0]}{oldest[1] + 1}"
    assert tool["cibuildwheel"]["build"] == [f"cp{oldest[0]}{oldest[1]}-*", f"{stable}-*"]


def test_the_script_names_no_file_that_only_bash_can_open() -> None:
    """It runs on Windows too, whose Python opens no ``/proc/self/fd``; bash itself may read one."""
    text = (ROOT / "scripts/matrix.sh").read_text()
    code = [line.partition("# ")[0] for line in text.splitlines()]
    assert [line for line in code if re.search(r"(?<!< )[<>]\(", line)] == []


def test_the_hosted_run_has_the_tools_that_steps_would_be_skipped_without() -> None:
    """.ci/run installs them as root only."""
    wanted = re.findall(r"\bhave \S+ ([a-z][\w+-]*)", (ROOT / ".ci/run").read_text())
    assert len(wanted) == 4
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step["run"] for step in workflow["jobs"]["whole"]["steps"] if "run" in step]
    before = " ".join(steps[: steps.index("bash .ci/run")]).split()
    assert set(wanted) <= set(before)


def test_the_containers_of_wheels_see_the_settings_of_their_job() -> None:
    """cibuildwheel builds and tests for Linux in a container, with the variables that it names."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert workflow["jobs"]["wheels"]["env"].keys() == set(tool["linux"]["environment-pass"])


@pytest.mark.parametrize("folder", ["", "lab"])
def test_the_packages_ask_for_the_oldest_versions_that_the_readme_names(folder: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch"))
    assert version(torch.removeprefix("torch>=")) == claimed("torch")[0]
    oldest, newest = claimed("Python")
    assert version(project["requires-python"].removeprefix(">=")) == oldest
    start = "Programming Language :: Python :: 3."
    named = [each for each in project["classifiers"] if each.startswith(start)]
    minors = range(oldest[1], newest[1] + 1)
    assert named == [f"{start}{minor}" for minor in minors]


def test_the_conda_recipe_is_of_this_package() -> None:
    """Its version is the package's, and it asks for what the package asks for."""
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    found = re.search(r'__version__ = "(.*)"', (ROOT / "src/tilewise/__init__.py").read_text())
    assert found is not None
    assert recipe["context"]["version"] == found[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [each.replace("torch", "pytorch") for each in project["project"]["dependencies"]]
    run = [each.replace(" >=", ">=") for each in recipe["requirements"]["run"]]
    assert run == [f"python{project['project']['requires-python']}", *wanted]
    host = [each.replace(" >=", ">=") for each in recipe["requirements"]["host"]]
    assert set(project["build-system"]["requires"]) <= set(host)
