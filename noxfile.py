"""The checks of this project, each in an environment of its own: ``./dev nox --list``."""

import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "uv|virtualenv"
# A session that can't run fails.
nox.options.error_on_missing_interpreters = True

PYTHONS = ["3.12", "3.13"]
OLDEST, NEWEST = PYTHONS[0], PYTHONS[-1]

# whole files, because the examples of a page depend on each other; three at a time, because processes wait
PYTEST = "-m", "pytest", "--numprocesses=3", "--dist=loadfile"
# tests that start processes wait for them two fifths of the time; the longest files don't come last
EVERYTHING = "--all", "--ignore=tests/libraries", "--numprocesses=4", "--no-loadscope-reorder"
# tests whose results can differ between versions of Python and of numpy
LAWS = "tests/test_laws.py", "tests/test_resume.py", "tests/test_sampler.py", "tests/core/test_wrapped.py"
# ./dev test runs more examples of each law
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
    session.run("zizmor", "--quiet", "--offline", ".github")
    session.run("mypy")
    # otherwise, it uses .venv, whose packages depend on the last ./dev
    session.run("basedpyright", f"--pythonpath={session.bin}/python")


@nox.session(python=NEWEST)
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    sync(session, "--all-extras", "--group=docs")  # signatures refer to PyTorch and JAX, and the notebook runs
    session.run("sphinx-build", "--fresh-env", "--fail-on-warning", "--keep-going", "docs", "docs/_build/html")


@nox.session(python=NEWEST)
def wheel(session: nox.Session) -> None:
    """Build the distributions, and use the wheel where torch and jax are not installed."""
    with tempfile.TemporaryDirectory() as folder:
        session.run_install("uv", "build", "--quiet", f"--out-dir={folder}")  # the wheel is built from the sdist
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
        if max(sizes.values()) > 3_000_000:
            session.error(f"A distribution has files that don't belong to the project. Bytes: {sizes}")
        (built,) = Path(folder).glob("*.whl")
        session.install(str(built))
    session.run("python", ".ci/check_wheel.py")


@nox.session(python=NEWEST)
def annbatch(session: nox.Session) -> None:
    """Run annbatch's tests of its DistributedSampler with the sampler of this project."""
    sync(session, "--all-extras", "--group=test")
    session.install("pip")
    script = "from importlib.metadata import version; print(version('annbatch'))"
    version = str(session.run("python", "-c", script, silent=True)).strip()
    with tempfile.TemporaryDirectory() as folder:
        pip = "python", "-m", "pip", "--quiet", "download", "--no-deps", "--no-binary=annbatch"
        session.run_install(*pip, f"--dest={folder}", f"annbatch=={version}")
        (sdist,) = Path(folder).glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder, filter="data")
        plugin = {"PYTHONPATH": str(Path(".ci").absolute())}
        tests = "tests/test_sampler.py", "tests/test_class_sampler.py"
        with session.chdir(sdist.with_name(f"annbatch-{version}")):
            # annbatch makes errors of warnings, and doesn't warn of classes that a shard lacks
            of_class = "-W", "ignore:The shard of rank:UserWarning"
            own = "-p", "in_place_of_annbatch", "-k", "istributed", *of_class
            session.run("python", "-m", "pytest", *own, *tests, env=plugin)


@nox.session(python=NEWEST, name="bench-small")
def bench_small(session: nox.Session) -> None:
    """Run the benchmarks at a small size: they must work, whatever the times."""
    sync(session, "--extra=torch", "--group=bench", "--group=pytest")
    # tests are independent; the longest one starts first
    session.run("python", *PYTEST, "--dist=worksteal", "tests/libraries", *session.posargs)


@nox.session(python=NEWEST, default=False)
def bench(session: nox.Session) -> None:
    """Run all or the named benchmarks at full size, and write the figures of the documentation."""
    sync(session, "--extra=torch", "--group=bench")
    for name in session.posargs or [path.stem for path in sorted(Path("benchmarks").glob("*.py"))]:
        session.run("python", "-m", f"benchmarks.{name}")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run all tests on the oldest Python, which users are promised, and check the coverage; on others, run the laws."""
    sync(session, "--all-extras", "--group=test")
    if session.posargs or session.python != OLDEST:
        session.run("python", *PYTEST, *(session.posargs or LAWS), env=FEWER_EXAMPLES)
        return
    # includes processes that the tests start, but forked ones
    session.run("coverage", "erase")
    session.run("coverage", "run", *PYTEST, *EVERYTHING, env=FEWER_EXAMPLES)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "xml", "--quiet", "--fail-under=0")  # for codecov
    session.run("coverage", "report")


@nox.session(python=OLDEST, default=False)
def lowest(session: nox.Session) -> None:
    """Run the tests with the oldest Python and the oldest dependencies that pyproject.toml allows."""
    # not with uv sync, which would write these versions to the lock file
    project = "--editable=.[torch,jax]", "--group=test"
    session.run_install("uv", "pip", "install", "--quiet", "--resolution=lowest-direct", *project)
    session.run("python", *PYTEST, *session.posargs, env=FEWER_EXAMPLES)


@nox.session(python="3.14", default=False)
def coming(session: nox.Session) -> None:
    """Run the tests on a Python that only the workflow on GitHub requires."""
    sync(session, "--all-extras", "--group=test")
    session.run("python", *PYTEST, *session.posargs, env=FEWER_EXAMPLES)


#: What `upcoming` takes annbatch from, by its name there.
ANNBATCH = {"pre-releases": "annbatch", "main": "annbatch @ git+https://github.com/scverse/annbatch@main"}


@nox.session(python=NEWEST, default=False)
@nox.parametrize("annbatch", list(ANNBATCH.values()), ids=list(ANNBATCH))
def upcoming(session: nox.Session, annbatch: str) -> None:
    """Run the tests with the coming versions of what this project reads with, also excluded ones of annbatch."""
    sync(session, "--all-extras", "--group=test")
    # without uv's limit on dates; annbatch without its dependencies, which may contradict the others' versions
    newest = "uv", "pip", "install", "--quiet", "--prerelease=allow", "--exclude-newer=2100-01-01", "--upgrade"
    session.run_install(*newest, "anndata", "numpy", "pandas", "zarr", "zarrs")
    session.run_install(*newest, "--no-deps", annbatch)
    session.run("uv", "pip", "list", "--quiet")
    session.run("python", *PYTEST, *session.posargs, env=FEWER_EXAMPLES)


@nox.session(python=NEWEST, default=False)
def thorough(session: nox.Session) -> None:
    """Run all or the named tests with 1,000 examples of each law, for hours."""
    sync(session, "--all-extras", "--group=test")
    # a law may take an hour; tests with their own time limit keep it
    session.run("python", *PYTEST, "--all", "--timeout=3600", *session.posargs, env={"HYPOTHESIS_PROFILE": "thorough"})


@nox.session(python=NEWEST, default=False)
def planted(session: nox.Session) -> None:
    """Plant all or the named faults, each of which simulated jobs must find within a minute."""
    sync(session, "--all-extras", "--group=test")
    session.run("python", "-m", "tests.simulated.planted", *session.posargs)


@nox.session(python=NEWEST, default=False)
def mutation(session: nox.Session) -> None:
    """Change the code in one place at a time, and list the changes that no test notices."""
    sync(session, "--all-extras", "--group=mutation")
    names = [f"annbatch_distributed.core.{module}.*" for module in session.posargs]
    mutmut = "python", ".ci/mutation.py"
    session.run(*mutmut, "run", *names, env={"HYPOTHESIS_PROFILE": "mutation"})
    if not names:  # for named modules, the result of each change was printed above
        session.run(*mutmut, "results")
