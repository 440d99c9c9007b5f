"""entrypoint.sh under a real bash, with programs that are there, fail, or are missing."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.container.dockerfiles import CONTAINER

BASH = shutil.which("bash")
TOOLS = ("mkdir", "id")  # what the script itself runs
FI_INFO = """#!/bin/sh
echo "fi_info: 1.22.0amzn4.0"
echo "libfabric: 1.22.0amzn4.0"
echo "libfabric api: 1.22"
"""

pytestmark = pytest.mark.skipif(BASH is None, reason="no bash here")


@dataclass
class Image:
    """A folder of programs in place of PATH, and a copy of what images have in /opt/trainkit."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def python(self, python: str = sys.executable) -> None:
        self.program("python3", f'#!{BASH}\nexec "{python}" "$@"\n')

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "entrypoint.sh", *arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env={
                "PATH": str(self.folder / "bin"),
                "HOME": str(self.folder),
                "USER": "somebody",
                **self.variables,
            },
        )

    def versions(self, *arguments: str) -> dict[str, str]:
        """The block on stderr, by name."""
        done = self.run(*(arguments or ("true",)))
        head, *lines = done.stderr.splitlines()
        assert head == "trainkit's image:"
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


@pytest.fixture
def image(tmp_path: Path) -> Image:
    assert BASH is not None
    (tmp_path / "bin").mkdir()
    for name in ("entrypoint.sh", "versions.py"):
        shutil.copy(CONTAINER / name, tmp_path / name)
    text = (tmp_path / "entrypoint.sh").read_text()
    (tmp_path / "entrypoint.sh").write_text(text.replace("#!/bin/bash", f"#!{BASH}", 1))
    for name in ("true", "env", "sh", "bash", *TOOLS):
        path = shutil.which(name)
        assert path is not None
        (tmp_path / "bin" / name).symlink_to(path)
    return Image(tmp_path)


def test_says_what_the_image_has(image: Image) -> None:
    image.python()
    image.program("fi_info", FI_INFO)
    image.variables["TRAINKIT_IMAGE_REVISION"] = "0123abc"
    found = image.versions()
    assert list(found) == ["python", "trainkit", "torch", "cuda", "nccl", "libfabric", "commit"]
    version = ".".join(str(number) for number in sys.version_info[:3])
    assert found["python"].startswith(f"{version} (")
    assert found["libfabric"] == "1.22.0amzn4.0"
    assert found["commit"] == "0123abc"


def test_torch_is_not_imported_for_its_version(image: Image) -> None:
    """It would cost seconds at each start of a container. CUDA's version stands in a file."""
    site = image.folder / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "torch" / "version.py").write_text("cuda: str | None = '13.2'\n")
    (site / "torch-2.12.0.dist-info").mkdir()
    (site / "torch-2.12.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0a0\n"
    )
    code = f"import runpy, sys; sys.path.insert(0, {str(site)!r})"
    image.program(
        "python3",
        f'#!{BASH}\nexec "{sys.executable}" -c "{code}; runpy.run_path(sys.argv[2],'
        ' run_name=\'__main__\')" "$@"\n',
    )
    found = image.versions()
    assert found["torch"] == "2.12.0a0"
    assert found["cuda"] == "13.2"


def test_missing_programs_are_said_and_stop_nothing(image: Image) -> None:
    found = image.versions()
    assert found == dict.fromkeys(["python", "libfabric", "commit"], "not in this image")
    assert image.run("true").returncode == 0


def test_a_python_that_fails_is_said(image: Image) -> None:
    image.program("python3", "#!/bin/sh\necho broken >&2\nexit 3\n")
    assert image.versions()["python"] == "not in this image"


def test_becomes_its_arguments(image: Image) -> None:
    """Also their exit code, and each word as it is; stdout is theirs alone."""
    done = image.run("sh", "-c", 'printf "%s|" "$@"; exit 7', "sh", "a b", "", "*")
    assert (done.returncode, done.stdout) == (7, "a b||*|")


def test_the_same_process(image: Image) -> None:
    """A signal to the container's first process reaches the program."""
    child = subprocess.Popen(
        [image.folder / "entrypoint.sh", "sh", "-c", "echo $$"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"PATH": str(image.folder / "bin"), "HOME": str(image.folder)},
    )
    said, _ = child.communicate()
    assert int(said) == child.pid


def test_without_arguments_a_shell(image: Image) -> None:
    assert image.run().returncode == 0  # bash reads the end of its input


def test_a_program_that_is_not_there(image: Image) -> None:
    done = image.run("no-such-program")
    assert done.returncode == 127
    assert "no-such-program" in done.stderr


def test_quiet(image: Image) -> None:
    image.variables["TRAINKIT_IMAGE_QUIET"] = "1"
    assert image.run("true").stderr == ""


@pytest.mark.parametrize("home", ["/", "/nonexistent", ""])
def test_a_user_without_a_home_gets_one(image: Image, home: str) -> None:
    if os.access("/", os.W_OK) and home == "/":
        pytest.skip("root may write to /: its home is left as it is")
    image.variables["HOME"] = home
    done = image.run("sh", "-c", 'echo "$HOME"')
    place = Path(f"/tmp/home-{os.getuid()}")
    assert done.stdout == f"{place}\n"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_a_home_that_another_user_made_is_refused() -> None:
    uid = 100_000 + os.getpid()
    place = Path(f"/tmp/home-{uid}")
    place.mkdir(mode=0o777)
    script = place / "entrypoint.sh"
    shutil.copy(CONTAINER / "entrypoint.sh", script)
    try:
        done = subprocess.run(
            [str(BASH), str(script), "true"],
            capture_output=True,
            text=True,
            check=False,
            user=uid,
            cwd="/",
            env={"PATH": os.environ["PATH"], "TRAINKIT_IMAGE_QUIET": "1"},
        )
    finally:
        shutil.rmtree(place)
    assert done.returncode == 1 and f"{place} is not of user {uid}" in done.stderr


def test_a_home_that_can_be_written_to_stays(image: Image) -> None:
    done = image.run("sh", "-c", 'echo "$HOME $USER"')
    assert done.stdout == f"{image.folder} somebody\n"


def test_a_user_without_a_name_gets_one(image: Image) -> None:
    (image.folder / "bin/id").unlink()
    image.variables["USER"] = ""
    done = image.run("sh", "-c", 'echo "$USER"')
    assert done.stdout == f"user-{os.getuid()}\n"
