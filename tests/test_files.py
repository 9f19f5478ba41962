import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.files import sha256, write_whole, write_whole_directory


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
    with pytest.raises(FileExistsError, match="remove it or choose another name"), write_whole_directory(path):
        pass


def test_a_second_writer_waits_and_what_a_killed_one_leaves_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "store"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom assay.files import write_whole_directory\n"
        "with write_whole_directory(Path(sys.argv[1])) as p:\n"
        "    (p / 'a').write_text('x'); print('writing', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    with (
        pytest.raises(FileExistsError, match=r"another process is writing .*store; wait"),
        write_whole_directory(path),
    ):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not path.exists() and len(list(tmp_path.iterdir())) == 1
    with write_whole_directory(path) as partial:
        (partial / "a").write_text("y")
    assert list(tmp_path.iterdir()) == [path]
    assert time.time() - path.stat().st_mtime < 60
