"""The checks of this project, each in an environment of its own: ``./dev nox --list``."""

import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "uv|virtualenv"
# A check that can't run has failed.
nox.options.error_on_missing_interpreters = True

PYTHONS = ["3.12", "3.13"]
NEWEST = PYTHONS[-1]


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


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests; on the newest Python with all real processes, and what is covered is measured, in them too."""
    sync(session, "--all-extras", "--group=test")
    # two files at once: the examples of a page follow each other, and tests of processes start up to four
    pytest = "pytest", "--numprocesses=2", "--dist=loadfile"
    if session.python != NEWEST:  # no line is there for one Python only, and jobs start as they do on any
        folders = ("--ignore=tests/frameworks", "--ignore=tests/processes")
        session.run("python", "-m", *pytest, *folders, *session.posargs)
        return
    # the laws have more examples on the other Python, and in ./dev test
    session.run("coverage", "run", "-m", *pytest, *session.posargs, env={"HYPOTHESIS_PROFILE": "brief"})
    session.notify("coverage")


@nox.session(python=NEWEST)
def coverage(session: nox.Session) -> None:
    """Add up what the tests and their subprocesses covered, and ask for enough."""
    sync(session, "--only-group=coverage")
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session(python=NEWEST)
def lint(session: nox.Session) -> None:
    """Check style, format and types."""
    sync(session, "--all-extras", "--group=lint", "--group=docs")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


@nox.session(python=NEWEST)
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    sync(session, "--extra=testing", "--group=docs")
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
def bench(session: nox.Session) -> None:
    """Run the benchmarks at a small size: they must work, whatever the times."""
    sync(session, "--extra=torch", "--group=bench")
    session.run("python", "benchmarks/sampling.py", "--small", *session.posargs)
    session.run("python", "benchmarks/resume.py", "--small", *session.posargs)
    session.run("python", "benchmarks/workers.py", "--small", *session.posargs)
    session.run("python", "benchmarks/representativeness.py", "--small", f"--out={session.create_tmp()}/figure.svg")


@nox.session(python=NEWEST, default=False)
def mutation(session: nox.Session) -> None:
    """Change the code in one place at a time, and show the changes that no test notices: see CONTRIBUTING.md."""
    sync(session, "--all-extras", "--group=mutation")
    names = [f"annbatch_distributed.{module}.*" for module in session.posargs]
    mutmut = "python", ".ci/mutation.py"
    session.run(*mutmut, "run", *names, env={"HYPOTHESIS_PROFILE": "mutation"})
    if not names:  # of some modules, what has become of each change has just been printed
        session.run(*mutmut, "results")
