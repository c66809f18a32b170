"""The control file, as operators, scripts and accidents write it."""

import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akjax.scheduler.control_file import Command, ControlFile

DRAFT_LIMIT = 7
ADAPT = Command(None, None)


def read(path: Path, least: int = 1) -> Command:
    return ControlFile(path, DRAFT_LIMIT, least).read()


def force(k: int) -> Command:
    return Command(k, None)


def write(path: Path, content: str, mtime_ns: int) -> None:
    path.write_text(content)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def test_without_a_path_it_adapts() -> None:
    assert ControlFile(None, DRAFT_LIMIT).read() == ADAPT


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("force 3", 3),
        ("force 3\n", 3),
        ("force 3\r\n", 3),
        ("\n  force\t3  \n\n", 3),
        ("force 003", 3),
        ("force 1", 1),
        ("force 7", 7),
        ("force 8", 7),
        ("force 0", 1),
        ("force 1000000000", 7),
        ("force " + 400 * "9", 7),
    ],
)
def test_force_is_clamped_to_the_levels_there_can_be(tmp_path: Path, content: str, expected: int) -> None:
    path = tmp_path / "control"
    path.write_text(content)
    assert read(path) == force(expected)


@pytest.mark.parametrize(("content", "expected"), [("force 0", 0), ("force 00", 0), ("force 1", 1), ("force 8", 7)])
def test_no_drafts_can_be_forced_where_that_is_a_level(tmp_path: Path, content: str, expected: int) -> None:
    path = tmp_path / "control"
    path.write_text(content)
    assert read(path, least=0) == force(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("policy reference", "reference"),
        ("policy default\n", "default"),
        ("\n policy\t\treference \r\n", "reference"),
    ],
)
def test_a_policy_is_adapted_by(tmp_path: Path, content: str, expected: Any) -> None:
    path = tmp_path / "control"
    path.write_text(content)
    assert read(path) == Command(None, expected)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n",
        "force",
        "force ",
        "force x",
        "force 3x",
        "force -3",
        "force +3",
        "force 3.0",
        "force 1_0",
        "force3",
        "force 3 4",
        "force 3 please",
        "please force 3",
        "force 3\nforce 4",
        "# force 3",
        "FORCE 3",
        "Force 3",
        "adapt",
        "3",
        "policy",
        "policy best",
        "policy default 3",
        "policydefault",
        "Policy default",
        "policy Default",
        "default",
        "force 3\npolicy default",
        "policy default\npolicy default",
        "policy defaul",
        "force ٣",
        "\ufeffforce 3",
        "force 3\0",
    ],
)
def test_anything_else_adapts(tmp_path: Path, content: str) -> None:
    path = tmp_path / "control"
    path.write_bytes(content.encode())
    assert read(path) == ADAPT


@pytest.mark.parametrize("content", [bytes(range(256)), b"\xff\xfe" + "force 3".encode("utf-16-le"), b"force \xb3"])
def test_binary_junk_adapts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "control"
    path.write_bytes(content)
    assert read(path) == ADAPT


@pytest.mark.parametrize(
    "content",
    [b"force 3\n" * 100_000, b"force 3" + b" " * 5000 + b"junk"],
    ids=["repeated", "junk behind blanks"],
)
def test_a_huge_file_adapts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "control"
    path.write_bytes(content)
    assert read(path) == ADAPT


@pytest.mark.parametrize("blanks", range(4080, 4100))
def test_a_number_is_never_cut_short(tmp_path: Path, blanks: int) -> None:
    path = tmp_path / "control"
    path.write_bytes(b" " * blanks + b"force 12")
    assert ControlFile(path, 20).read().forced in (12, None)


def test_paths_that_hold_no_file_adapt(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("force 3")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("absent", "no/folder", "file/below", "loop", "dangling", "x" * 300, "."):
        assert read(tmp_path / name) == ADAPT


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_path_that_no_file_can_have_adapts(name: str) -> None:
    assert read(Path(name)) == ADAPT


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "control"
    os.mkfifo(path)
    control = ControlFile(path, DRAFT_LIMIT)
    commands: list[Command] = []
    reader = Thread(target=lambda: commands.append(control.read()), daemon=True)
    reader.start()
    reader.join(timeout=1.0)
    if reader.is_alive():  # let it go
        os.close(os.open(path, os.O_WRONLY))
        reader.join()
        pytest.fail("a step waited for someone to write to the control file")
    assert commands == [ADAPT]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_adapts(tmp_path: Path) -> None:
    path = tmp_path / "control"
    path.write_text("force 3")
    path.chmod(0)
    control = ControlFile(path, DRAFT_LIMIT)
    assert control.read() == ADAPT
    path.chmod(0o600)
    assert control.read() == force(3)


def test_a_symlink_is_followed_to_where_it_points_now(tmp_path: Path) -> None:
    for k in (3, 4):
        write(tmp_path / f"{k}", f"force {k}", 0)
    link = tmp_path / "control"
    control = ControlFile(link, DRAFT_LIMIT)
    for k in (3, 4, 3):
        link.unlink(missing_ok=True)
        link.symlink_to(f"{k}")
        assert control.read() == force(k)


def test_the_file_may_come_go_and_change_while_serving(tmp_path: Path) -> None:
    path = tmp_path / "control"
    control = ControlFile(path, DRAFT_LIMIT)
    assert control.read() == ADAPT
    write(path, "force 3", 1)
    assert control.read() == force(3)
    write(path, "force 4", 2)
    assert control.read() == force(4)
    write(path, "adapt", 3)
    assert control.read() == ADAPT
    write(path, "force 5", 4)
    assert control.read() == force(5)
    path.unlink()
    assert control.read() == ADAPT
    write(path, "force 5", 4)
    assert control.read() == force(5)
    path.unlink()
    path.mkdir()
    assert control.read() == ADAPT
    path.rmdir()
    write(path, "force 6", 4)
    assert control.read() == force(6)


def test_an_older_file_counts_as_changed(tmp_path: Path) -> None:
    path = tmp_path / "control"
    control = ControlFile(path, DRAFT_LIMIT)
    for k, mtime_ns in ((3, 10**18), (4, 10**9)):
        write(path, f"force {k}", mtime_ns)
        assert control.read() == force(k)


def test_a_file_emptied_before_it_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "control"
    control = ControlFile(path, DRAFT_LIMIT)
    for content, expected in (("force 3", force(3)), ("", ADAPT), ("force", ADAPT), ("force 4", force(4))):
        write(path, content, 0)
        assert control.read() == expected


def test_a_file_replaced_within_the_clocks_resolution_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "control"
    control = ControlFile(path, DRAFT_LIMIT)
    for k in (3, 4, 5):
        write(tmp_path / "new", f"force {k}", 0)
        (tmp_path / "new").replace(path)
        assert control.read() == force(k)


def test_a_file_rewritten_in_place_with_its_old_time_is_read_again(tmp_path: Path) -> None:
    """As `cp -p` and `rsync --inplace --times` do."""
    path = tmp_path / "control"
    control = ControlFile(path, DRAFT_LIMIT)
    write(path, "force 3", 0)
    assert control.read() == force(3)
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:  # at most one tick of the kernel's clock
        write(path, "force 4", 0)
    assert control.read() == force(4)


class CountingPath(type(Path())):
    """A path that counts how often its file is opened."""

    opened = 0

    def open(self, *args: Any, **kwargs: Any) -> Any:
        type(self).opened += 1
        return super().open(*args, **kwargs)


@pytest.mark.parametrize(
    ("content", "expected"),
    [("force 3", force(3)), ("policy default", Command(None, "default")), ("adapt", ADAPT)],
)
def test_the_file_is_read_only_when_it_has_changed(tmp_path: Path, content: str, expected: Command) -> None:
    path = CountingPath(tmp_path / "control")
    control = ControlFile(path, DRAFT_LIMIT)
    for mtime_ns in (0, 1):
        write(Path(path), content, mtime_ns)
        CountingPath.opened = 0
        for _ in range(10):
            assert control.read() == expected
        assert CountingPath.opened == 1


def expected_of(content: bytes) -> Command:
    match content.split():
        case [b"force", number] if number.isdigit():
            return force(min(max(int(number), 1), DRAFT_LIMIT))
        case [b"policy", (b"reference" | b"default") as name]:
            return Command(None, "reference" if name == b"reference" else "default")
        case _:
            return ADAPT


NEARLY = st.lists(
    st.sampled_from(
        [
            b"force",
            b"policy",
            b"default",
            b"reference",
            b" ",
            b"\n",
            b"\t\v",
            b"\r\n",
            b"3",
            b"12",
            b"0",
            b"-",
            b"x",
            b"\0",
            b"\xff",
            b"FORCE",
        ]
    ),
    max_size=8,
).map(b"".join)


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary(max_size=40) | NEARLY | st.tuples(st.sampled_from([b"force ", b"policy "]), NEARLY).map(b"".join)
)
def test_any_bytes_mean_what_they_say_or_nothing(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "control"
    path.write_bytes(content)
    assert read(path) == expected_of(content)
