import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from filelock import FileLock

from assay.errors import AssayError
from assay.files import (
    content_hash,
    csv_cell,
    csv_text,
    decoding,
    differences,
    hold_lock,
    is_held,
    read_json,
    read_text,
    remove_leftovers,
    sha256,
    write_whole,
    write_whole_directory,
)
from assay.study.stages import disk_use
from tests.errors import fault, rejected


def test_a_file_is_replaced_whole_or_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    with write_whole(path) as partial:
        partial.write_text("one")
    with pytest.raises(RuntimeError), write_whole(path) as partial:
        partial.write_text("tw")
        raise RuntimeError
    assert path.read_text() == "one"
    assert list(path.parent.iterdir()) == [path]
    assert partial.suffix == ".json"  # writers that look at the suffix still see it
    assert sha256(path) == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"


def test_a_directory_appears_whole_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with pytest.raises(RuntimeError), write_whole_directory(path) as partial:
        (partial / "a").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with write_whole_directory(path) as partial:
        (partial / "a").write_text("x")
        assert not path.exists()
    assert (path / "a").read_text() == "x"
    with rejected(path=path), write_whole_directory(path):
        pass


def test_a_link_to_nothing_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unplugged")
    with rejected(path="link"), write_whole_directory(tmp_path / "link"):
        raise AssertionError("before any work")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / ".assay-partial").exists()


def test_a_second_writer_waits_and_what_a_killed_one_leaves_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "store"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom assay.files import write_whole_directory\n"
        "with write_whole_directory(Path(sys.argv[1])) as p:\n"
        "    (p / 'a').write_text('x'); print('writing', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    with rejected(path=path), write_whole_directory(path):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert os.listdir(tmp_path) == [".assay-partial"]
    with write_whole_directory(path) as partial:
        (partial / "a").write_text("y")
    assert list(tmp_path.iterdir()) == [path]
    assert time.time() - path.stat().st_mtime < 60


def test_leftovers_go_and_work_in_progress_stays(tmp_path: Path) -> None:
    deep = tmp_path / "deep" / ".assay-partial"
    for name in ("a.txt", "a.txt.lock", "store.lock", "store/inner/x"):
        (deep / name).parent.mkdir(parents=True, exist_ok=True)
        (deep / name).write_text("half")
    held = hold_lock(tmp_path / "mine", "")
    with held, write_whole(tmp_path / "c.txt") as mine, write_whole_directory(tmp_path / "d") as folder:
        mine.write_text("x")
        (folder / "file").write_text("y")
        remove_leftovers(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [".assay-partial", "deep"]
        unfinished = ["c.txt", "c.txt.lock", "d", "d.lock", "mine.lock"]
        assert sorted(os.listdir(tmp_path / ".assay-partial")) == unfinished
    assert sorted(os.listdir(tmp_path)) == ["c.txt", "d", "deep"] and not os.listdir(tmp_path / "deep")
    deep.mkdir()
    (deep / "a.txt").write_text("the leftover of a killed writer, longer than what comes")
    with write_whole(tmp_path / "deep/a.txt") as partial:
        assert partial == deep / "a.txt" and partial.read_text() == ""
    assert os.listdir(tmp_path / "deep") == ["a.txt"]


def test_folders_may_vanish_under_those_who_look_for_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir
    for name in ("a/.assay-partial/x.lock", "b/file"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("12345")

    def scandir(path: Any = ".") -> Any:
        if Path(path).name == "b":
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert disk_use(tmp_path) == 5
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path / "a") == []


def test_a_directory_is_written_though_another_process_looks_for_leftovers(tmp_path: Path) -> None:
    (tmp_path / ".assay-partial").mkdir()
    looked_at = FileLock(tmp_path / ".assay-partial" / "store.lock", thread_local=False)
    looked_at.acquire()
    Timer(0.2, looked_at.release).start()
    with write_whole_directory(tmp_path / "store"):
        pass
    assert os.listdir(tmp_path) == ["store"]


def test_a_folder_that_another_writer_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.mkdir, list[Path]()

    def mkdir(path: Any, *mode: Any) -> None:
        seen.append(path)
        if len(seen) < 4:  # it is there, and gone a moment later
            raise FileExistsError(path)
        real(path, *mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with write_whole(tmp_path / "a.txt") as partial:
        partial.write_text("x")
    assert len(seen) > 3 and os.listdir(tmp_path) == ["a.txt"]
    (tmp_path / "link").symlink_to(tmp_path / "unplugged")
    with pytest.raises(FileExistsError), write_whole(tmp_path / "link" / "a.txt"):
        pass  # and it does not try for ever


def test_files_of_others_stay(tmp_path: Path) -> None:
    theirs = ".lock", "notes/.a.lock", ".a.txt.partial.txt", ".X.partial.lock", ".X.partial/thesis.tex"
    theirs += ".assay-partial/thesis.tex", "notes/.assay-partial/kept/a.txt"
    for name in theirs:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / ".assay-partial").symlink_to(tmp_path / "notes")
    with hold_lock(tmp_path / ".lock", ""):
        remove_leftovers(tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in theirs)


def test_two_writers_of_one_file_both_succeed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with write_whole(path) as first:
        first.write_text("first")
        with write_whole(path) as second:
            assert second != first
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["a.txt"]


def test_a_lock_names_its_holder_and_ends_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "busy"
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom assay.files import hold_lock\n"
        "with hold_lock(Path(sys.argv[1]), ''):\n"
        "    if os.fork() == 0: time.sleep(5); os._exit(0)\n"  # a child that outlives it does not hold the lock
        "    print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    assert is_held(lock)
    holder = f"^busy: process {process.pid} on "
    with pytest.raises(ValueError, match=holder), hold_lock(lock, "busy: {holder}"):
        pass
    monkeypatch.setattr("assay.files._SECONDS_UNTIL_WARNED", 0.0)
    Timer(0.3, process.kill).start()
    with pytest.warns(UserWarning, match=f"waiting for process {process.pid} on "), hold_lock(lock):
        process.wait()
    assert not is_held(lock)
    with hold_lock(lock, "busy"):
        assert not lock.exists() and (tmp_path / ".assay-partial" / "busy.lock").exists()
    assert os.listdir(tmp_path) == []


def test_whatever_goes_wrong_with_a_file_becomes_a_sentence_about_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    nested = "[" * 100_000
    for content, mention in (
        (b"\xff{", "utf-8"),
        (b"{", "Expecting"),
        (b"[1]", "holds a list"),
        (nested.encode(), "recursion"),
    ):
        path.write_bytes(content)
        found = fault(lambda: read_json(path))
        assert (found.path, found.cure) == (str(path), "get it again") and mention in found.what
    path.write_bytes(b"caf\xe9")
    found = fault(lambda: read_text(path))
    assert (found.path, found.cure) == (str(path), "save it as UTF-8 text")
    with pytest.raises(AssayError) as caught, decoding("x"):
        raise KeyError.__base__("a \x1b[31m\n b")
    assert caught.value.what == r"cannot be read (a \x1b[31m b)"  # no escape sequences reach the terminal
    with pytest.raises(FileNotFoundError), decoding(tmp_path / "gone"):
        (tmp_path / "gone").read_text()  # names its file already


def test_identity_is_that_of_contents(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "levels.csv").write_text("x.png,0.2")
    assert content_hash(a, {"size": 8}) == content_hash(b, {"size": 8})  # wherever they lie
    assert content_hash(b"abc") == content_hash(hashlib.sha256(b"abc").hexdigest())
    assert content_hash(1, [2.5, "x"]) == hashlib.sha256(b'[1, [2.5, "x"]]').hexdigest()
    before, file = content_hash(a), b / "deep" / "levels.csv"
    assert content_hash(a / "deep" / "levels.csv") == content_hash(file)
    file.write_text("x.png,0.02")
    assert content_hash(b) != before
    file.write_text("x.png,0.2")
    file.rename(b / "levels.csv")
    assert content_hash(b) != before
    with pytest.raises(TypeError):
        content_hash(object())


def test_cells_that_a_spreadsheet_would_run_are_text() -> None:
    for text in ("=1+1", "+1", "-a", "@x", "'=1", "\t=1", "a=1", "'a", ""):
        cell = str(csv_cell(text))
        assert csv_text(cell) == text and cell[:1] not in set("=+-@\t\r")
    assert csv_cell(-1.5) == -1.5 and csv_cell(None) == ""


@pytest.mark.parametrize("as_numpy_says_it", [False, True])
def test_a_full_disk_is_a_sentence(tmp_path: Path, as_numpy_says_it: bool) -> None:
    message = r"a\.txt could not be written: the disk is full \(.*\); free some space"
    with pytest.raises(OSError, match=message), write_whole(tmp_path / "a.txt"):
        if as_numpy_says_it:
            raise OSError("9 requested and 2 written")
        Path("/dev/full").write_text("x")
    assert os.listdir(tmp_path) == []


def test_differences_are_one_line_each_whatever_the_file_says() -> None:
    there = {"a": 1, "b": {"c": 2, "d\n\x7f": "\x1b[31m"}}
    assert differences(there, there) == []
    assert differences(there, {"a": 1, "b": {"c": 3}}) == [
        "b.c: 2 there, 3 here",
        "b.d \\x7f: \\x1b[31m there, None here",
    ]
