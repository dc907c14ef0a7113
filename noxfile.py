"""The checks of this project, each in an environment of its own: ``./dev nox --list``."""

import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "uv|virtualenv"
# A check that can't run has failed.
nox.options.error_on_missing_interpreters = True

PYTHONS = ["3.12", "3.13"]
OLDEST, NEWEST = PYTHONS[0], PYTHONS[-1]

# whole files: the examples of a page follow each other; more of them at once than two cores, because processes wait
PYTEST = "-m", "pytest", "--numprocesses=3", "--dist=loadfile"
# where every test stands alone, and some take as long as all others of their file
EACH = "--dist=worksteal"
# what has a session of its own; where nothing is named, pytest leaves out folders of tests that start many processes
BENCHMARKS, DEMO = "tests/libraries", "tests/processes/test_demo.py"
# the laws have more examples in ./dev test
FEWER_EXAMPLES = {"HYPOTHESIS_PROFILE": "brief"}


def sync(session: nox.Session, *selection: str) -> None:
    """Install this project and the selected extras and groups into the session's environment."""
    environment = session.virtualenv.location
    session.run_install(
        "uv",
        "sync",
        "--quiet",
        "--no-default-groups",
        f"--python={environment}",
        *selection,
        env={"UV_PROJECT_ENVIRONMENT": environment},
    )


@nox.session(python=NEWEST)
def lint(session: nox.Session) -> None:
    """Check style, format and types."""
    sync(session, "--all-extras", "--group=lint", "--group=docs")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    # else it takes .venv, where that is, which has what ./dev installed last
    session.run("basedpyright", f"--pythonpath={session.bin}/python")


@nox.session(python=NEWEST)
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    sync(session, "--all-extras", "--group=docs")  # signatures name what is torch's and jax's, and the notebook runs
    session.run("sphinx-build", "--fresh-env", "--fail-on-warning", "--keep-going", "docs", "docs/_build/html")


@nox.session(python=NEWEST)
def wheel(session: nox.Session) -> None:
    """Build the distributions, and use the wheel where torch and jax are not installed."""
    with tempfile.TemporaryDirectory() as folder:
        session.run_install("uv", "build", "--quiet", f"--out-dir={folder}")  # the wheel is built from the sdist
        (built,) = Path(folder).glob("*.whl")
        session.install(str(built))
    session.run("python", ".ci/check_wheel.py")


@nox.session(python=NEWEST)
def demo(session: nox.Session) -> None:
    """Run the demo and its tests, with what ./dev demo installs."""
    sync(session, "--extra=torch", "--extra=zarrs", "--group=demo", "--group=pytest")
    session.run("python", *PYTEST, EACH, DEMO, *session.posargs)


@nox.session(python=NEWEST, name="bench-small")
def bench_small(session: nox.Session) -> None:
    """Run the benchmarks at a small size: they must work, whatever the times."""
    sync(session, "--extra=torch", "--extra=zarrs", "--group=bench", "--group=pytest")
    # the longest test is the first of its folder, and so is begun first
    session.run("python", *PYTEST, EACH, BENCHMARKS, *session.posargs)


@nox.session(python=NEWEST, default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks, or those that are named, at full size, and write the figures of the documentation."""
    sync(session, "--extra=torch", "--extra=zarrs", "--group=bench")
    for name in session.posargs or [path.stem for path in sorted(Path("benchmarks").glob("*.py"))]:
        session.run("python", "-m", f"benchmarks.{name}")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests but those that take long; on the newest Python, what is covered is measured."""
    sync(session, "--all-extras", "--group=test")
    measured = ("coverage", "run") if session.python == NEWEST else ("python",)
    session.run(*measured, *PYTEST, *session.posargs, env=FEWER_EXAMPLES)


@nox.session(python=NEWEST)
def processes(session: nox.Session) -> None:
    """Run the tests that take long, by launchers and under frameworks; what is covered is measured."""
    sync(session, "--all-extras", "--group=test")
    folders = "tests/processes", "tests/frameworks", "docs/frameworks", f"--ignore={DEMO}"
    # one more than of other tests, because these wait for processes two fifths of their time
    session.run("coverage", "run", *PYTEST, "--numprocesses=4", *folders, *session.posargs, env=FEWER_EXAMPLES)


@nox.session(python=NEWEST)
def coverage(session: nox.Session) -> None:
    """Add up what the sessions "tests" and "processes" and their subprocesses covered, and ask for enough."""
    sync(session, "--only-group=coverage")
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "xml", "--quiet", "--fail-under=0")  # for codecov
    session.run("coverage", "report")


@nox.session(python=OLDEST, default=False)
def lowest(session: nox.Session) -> None:
    """Run the tests with the oldest Python and the oldest dependencies that pyproject.toml allows."""
    # not by uv sync, which would write these versions into the lock file
    project = "--editable=.[torch,jax,zarrs]", "--group=test"
    session.run_install("uv", "pip", "install", "--quiet", "--resolution=lowest-direct", *project)
    session.run("python", *PYTEST, *session.posargs, env=FEWER_EXAMPLES)


@nox.session(python="3.14", default=False)
def coming(session: nox.Session) -> None:
    """Run the tests on a Python that .ci/run does not ask for, and the workflow on GitHub does."""
    sync(session, "--all-extras", "--group=test")
    session.run("python", *PYTEST, *session.posargs, env=FEWER_EXAMPLES)


@nox.session(python=NEWEST, default=False, name="annbatch-next")
def annbatch_next(session: nox.Session) -> None:
    """Run the tests with the newest annbatch, pre-releases and versions that pyproject.toml excludes among them."""
    sync(session, "--all-extras", "--group=test")
    # without its dependencies, which are there, and without the date before which others are taken
    newest = "--prerelease=allow", "--no-deps", "--exclude-newer=2100-01-01", "--upgrade", "annbatch"
    session.run_install("uv", "pip", "install", "--quiet", *newest)
    session.run("python", "-c", "from importlib.metadata import version; print('annbatch', version('annbatch'))")
    session.run("python", *PYTEST, *session.posargs, env=FEWER_EXAMPLES)


@nox.session(python=NEWEST, default=False)
def thorough(session: nox.Session) -> None:
    """Run all tests, or those that are named, with 1,000 examples of each law, which takes long."""
    sync(session, "--all-extras", "--group=test")
    # a law may take an hour then; a test that says how long it may take means it all the same
    session.run("python", *PYTEST, "--all", "--timeout=3600", *session.posargs, env={"HYPOTHESIS_PROFILE": "thorough"})


@nox.session(python=NEWEST, default=False)
def mutation(session: nox.Session) -> None:
    """Change the code in one place at a time, and show the changes that no test notices: see CONTRIBUTING.md."""
    sync(session, "--all-extras", "--group=mutation")
    names = [f"annbatch_distributed.{module}.*" for module in session.posargs]
    mutmut = "python", ".ci/mutation.py"
    session.run(*mutmut, "run", *names, env={"HYPOTHESIS_PROFILE": "mutation"})
    if not names:  # of some modules, what has become of each change has just been printed
        session.run(*mutmut, "results")
